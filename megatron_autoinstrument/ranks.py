"""Which rank this process is, and whether that rank records and exports."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megatron_autoinstrument.registry import Registry

if TYPE_CHECKING:
    from megatron_autoinstrument.config import Config

# (rank, world size, local rank), in the order in which they are believed. torchrun's come first: it may itself
# have been started by srun or mpirun, whose numbers then count nodes.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


_PER_NODE = (
    *("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


class Rank(NamedTuple):
    """A process's place in the run."""

    rank: int
    world_size: int
    local_rank: int


def current() -> Rank:
    """This process's place, from torchrun's, SLURM's or Open MPI's variables; else the only process."""
    for names in _LAUNCHERS:
        try:
            rank, world_size = (int(os.environ[name]) for name in names[:2])
        except (KeyError, ValueError):
            continue
        if 0 <= rank < world_size:
            local_rank = os.environ.get(names[2], "")
            return Rank(rank, world_size, int(local_rank) if local_rank.isdigit() else 0)
    return Rank(0, 1, 0)


def is_helper_process() -> bool:
    """Whether `multiprocessing` started this process: a data worker or checkpoint writer, which runs the training
    script's imports again and must record nothing.

    A spawned child imports the main script before `parent_process()` knows, so its command line is asked too.
    """
    return multiprocessing.parent_process() is not None or any(
        argument.startswith("from multiprocessing.") for argument in sys.orig_argv
    )


def _single_rank(place: Rank, config: Config) -> bool:
    last = place.world_size - 1
    return place.rank == (config.export_rank if 0 <= config.export_rank <= last else last)


def sampled(place: Rank, config: Config) -> bool:
    """Whether `place` is among the share of ranks that MEGATRON_OTEL_EXPORT_SAMPLE_RATE names."""
    # Multiples of the golden ratio: any rate is met evenly, and never by the same local rank of every node.
    return place.rank * 0.6180339887498949 % 1.0 < config.export_sample_rate


STRATEGIES: Registry[Callable[[Rank, Config], bool]] = Registry(
    "megatron_autoinstrument_rank_strategy",
    {
        "single_rank": _single_rank,
        "all_ranks": lambda place, config: True,
        "sampled": sampled,
        "first_rank_per_node": lambda place, config: place.local_rank == 0,
    },
)


def register_rank_strategy(name: str, strategy: Callable[[Rank, Config], bool]) -> None:
    """Makes `strategy` available under `name` to MEGATRON_OTEL_RANK_STRATEGY. An installed package does the same by an
    entry point `name` in the group `megatron_autoinstrument_rank_strategy`.

    Args:
        name: What the variable will say.
        strategy: Tells whether a rank records and exports; it must answer alike wherever it is asked about a rank.

    Raises:
        ValueError: the name is taken.
    """
    STRATEGIES.register(name, strategy)


recording: Callable[[int], bool] = bool
"""Whether another rank of this run records, as far as its settings are this rank's; the instrumentor sets it."""


def records(rank: int, config: Config) -> bool:
    """Whether the rank of that number records and exports under `config`'s rank strategy, were it this process."""
    sizes = (re.match(r"[1-9]\d*", os.environ.get(name, "")) for name in _PER_NODE)  # SLURM's may be "8(x2)"
    per_node = next((int(size[0]) for size in sizes if size), None)
    # Where that is not known, it may be the first of its node.
    return exports(Rank(rank, current().world_size, rank % per_node if per_node else 0), config)


def exports(place: Rank, config: Config) -> bool:
    """Whether `place` records and exports under `config`'s rank strategy."""
    return bool(STRATEGIES.get(config.rank_strategy)(place, config))
