"""Span groups: which spans are recorded. The names and presets are those of Megatron's observability guide."""

from __future__ import annotations

GROUPS: dict[str, str] = {
    "job": "the whole run",
    "checkpoint": "checkpoint saves",
    "evaluate": "evaluation",
    "model_init": "model and optimizer construction",
    "load_checkpoint": "checkpoint load",
    "step": "each training iteration",
    "forward_backward": "the forward-backward pass of an iteration",
    "optimizer": "the optimizer step",
    "communication": "pipeline P2P and gradient synchronisation",
    "data_loading": "waiting for and preparing a batch",
    "inference": "inference requests (reserved upstream)",
    "microbatch": "each microbatch's forward and backward",
    "layer": "each transformer layer, with its attention and MLP",
    "activation_offload": "activation offload to the host and reload",
}

_DEFAULT = ("job", "checkpoint", "evaluate", "inference")
_PER_STEP = (
    *_DEFAULT,
    "model_init",
    "load_checkpoint",
    "step",
    "forward_backward",
    "optimizer",
    "communication",
    "data_loading",
)

PRESETS: dict[str, frozenset[str]] = {
    "default": frozenset(_DEFAULT),
    "per_step": frozenset(_PER_STEP),
    "all": frozenset(GROUPS),
    "profiling": frozenset(GROUPS),  # upstream's other name for "all"
}

# Not span groups, but what else a seam may be needed for.
METRICS = "metrics"
LOGS = "logs"
FLAGS = "flags"
"""Needed wherever we are loaded, also on ranks that don't export and where we are turned off: Megatron exits on a flag
that it doesn't know."""

KNOWN = f"presets ({', '.join(PRESETS)}) and groups ({', '.join(GROUPS)}), with commas between them"


def parse(spec: str) -> frozenset[str]:
    """The groups that `spec` names, such as "default,microbatch".

    Raises:
        ValueError: a name in it is neither a preset nor a group.
    """
    names = [name for part in spec.split(",") if (name := part.strip().lower())]
    unknown = [name for name in names if name not in PRESETS and name not in GROUPS]
    if unknown or not names:
        raise ValueError(spec)
    return frozenset().union(*(PRESETS.get(name, {name}) for name in names))
