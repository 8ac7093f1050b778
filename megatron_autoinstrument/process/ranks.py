"""Which rank this process is."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple


class Known(IntEnum):
    """How much it is worth, what `look` has found."""

    GUESSED = 0
    """Nobody has told this process its place yet. A scheduler's variables may speak of other processes: they stand in
    the shell of somebody's allocation as well, where plain Python runs alone."""
    TOLD = 1
    """RANK and WORLD_SIZE say so. Megatron reads them too, but perhaps other values later: a worker of Ray inherits
    those of the pod that has started it, and sets its own when it has imported Megatron."""
    SETTLED = 2
    """torch.distributed or Megatron itself says so."""


class Rank(NamedTuple):
    """A process's place in the run."""

    rank: int
    world_size: int
    local_rank: int | None
    """None where nobody tells it."""


class _Launcher(NamedTuple):
    """The variables by which a launcher tells a process its place."""

    rank: str
    world_size: tuple[str, ...]  # the first that is set
    local_rank: str
    proof: tuple[str, ...]
    """Those that nobody else sets, so that the others speak of this very process."""
    per_node: tuple[str, ...]
    """Those that have the number of ranks on a node; SLURM's may be "8(x2)"."""


# torchrun's come first: it may itself have been started by srun or mpirun, whose numbers then count nodes.
_LAUNCHERS = (
    _Launcher("RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("TORCHELASTIC_RUN_ID",), ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("PMI_SIZE",), ("MPI_LOCALNRANKS",)),
)


def look() -> tuple[Rank, Known]:
    """This process's place as far as it can be known now, and how sure that is. Ask when it is needed, not before."""
    for ask, known in _SOURCES:
        rank, size = ask()
        if isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size:
            return Rank(rank, size, _local_rank(rank, size)), known
    return Rank(0, 1, 0), Known.GUESSED


def current() -> Rank:
    """This process's place: torch.distributed's once that is initialised, else what Megatron has read, else what the
    launcher says; else the only process."""
    return look()[0]


def _of_torch() -> tuple[Any, Any]:
    torch = sys.modules.get("torch.distributed")
    try:
        if torch is not None and torch.is_initialized():
            return torch.get_rank(), torch.get_world_size()
    except Exception:  # noqa: BLE001
        pass  # in the middle of its import, or a build without it
    return None, None


def _of_megatron() -> tuple[Any, Any]:
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return getattr(args, "rank", None), getattr(args, "world_size", None)


def _of(launcher: _Launcher) -> tuple[int | None, int | None]:
    return _first(launcher.rank), _first(*launcher.world_size)


_SOURCES: tuple[tuple[Callable[[], tuple[Any, Any]], Known], ...] = (
    (_of_torch, Known.SETTLED),
    (_of_megatron, Known.SETTLED),
    (partial(_of, _LAUNCHERS[0]), Known.TOLD),
    *((partial(_of, launcher), Known.GUESSED) for launcher in _LAUNCHERS[1:]),
)


def _first(*variables: str) -> int | None:
    """The number that the first of them which has one begins with."""
    found = (re.match(r"\d+", os.environ.get(name, "").strip()) for name in variables)
    return next((int(digits[0]) for digits in found if digits), None)


def _local_rank(rank: int, world_size: int) -> int | None:
    for launcher in _LAUNCHERS:
        if _of(launcher) == (rank, world_size) and (number := _first(launcher.local_rank)) is not None:
            return number
    number = _first("LOCAL_RANK")
    return 0 if number is None and world_size == 1 else number


def place_on_node(place: Rank) -> tuple[int, int | None] | None:
    """The number of this process on its node, and how many there are; None where nobody tells that can be believed.
    Whoever sets LOCAL_RANK by hand may number devices, or give each process one device, which it knows as number 0."""
    for launcher in _LAUNCHERS:
        if _of(launcher) == place[:2] and any(name in os.environ for name in launcher.proof):
            number = _first(launcher.local_rank)
            if number is not None:
                return number, _first(*launcher.per_node)
    size = _first("LOCAL_WORLD_SIZE") or 0
    return (place.rank % size, size) if 1 < size <= place.world_size else None


def is_helper_process() -> bool:
    """Whether `multiprocessing` started this process: a data worker or checkpoint writer, which runs the training
    script's imports again and must record nothing.

    A spawned child imports the main script before `parent_process()` knows, so its command line is asked too.
    """
    return multiprocessing.parent_process() is not None or any(
        argument.startswith("from multiprocessing.") for argument in sys.orig_argv
    )
