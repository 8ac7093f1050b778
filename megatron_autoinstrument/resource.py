"""What is the same for all that this process records: the resource attributes."""

from __future__ import annotations

from megatron_autoinstrument.ranks import Rank


def attributes(place: Rank, run_id: str) -> dict[str, str | int]:
    """The attributes of `place` in the run `run_id`; anything that the user set by `OTEL_*` variables wins."""
    return {
        "service.name": "megatron-lm",
        "service.instance.id": f"{run_id}-rank{place.rank}",
        "nemo.run.id": run_id,
        "dl.rank": place.rank,
        "dl.world_size": place.world_size,
        "dl.local_rank": place.local_rank,
    }
