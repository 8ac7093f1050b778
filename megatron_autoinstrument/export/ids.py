"""Identifiers: span and trace ids that leave training's random state alone, and the run's own id."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import NamedTuple

from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

from megatron_autoinstrument.common.private_random import GENERATOR, random_span_id
from megatron_autoinstrument.megatron import state
from megatron_autoinstrument.process import ranks, store


class PrivateIdGenerator(IdGenerator):
    """The SDK's random ids, drawn from a generator of our own; or the ids planned for this thread's next span."""

    def __init__(self) -> None:
        self._planned = threading.local()

    def use_ids(self, trace_id: int | None, span_id: int | None) -> None:
        """What this thread's spans get from now on; None is a random id."""
        self._planned.trace_id, self._planned.span_id = trace_id, span_id

    def generate_span_id(self) -> int:
        planned: int | None = getattr(self._planned, "span_id", None)
        return planned or random_span_id()

    def generate_trace_id(self) -> int:
        planned: int | None = getattr(self._planned, "trace_id", None)
        return planned or GENERATOR.getrandbits(128) or self.generate_trace_id()


def private_generator(tracer: object) -> PrivateIdGenerator | None:
    """Gives our tracer ids of a private generator, where it would draw them from Python's global one. Other tracers
    of that provider, and generators that someone chose, stay as they are.

    Returns:
        The tracer's generator, or None where it has no private one.
    """
    if type(getattr(tracer, "id_generator", None)) in (RandomIdGenerator, PrivateIdGenerator):
        generator = PrivateIdGenerator()
        try:
            tracer.id_generator = generator  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001
            return None  # a tracer of somebody's, which doesn't let us
        if getattr(tracer, "id_generator", None) is generator:
            return generator
    return None


# They jitter their retries by what `random` draws: which module does, and how it came by it, differs between releases.
_RETRYING = ("opentelemetry.exporter.", "logfire._internal.exporters.")
_global_random = random.random.__self__  # type: ignore[attr-defined]
_modules_seen = 0


def keep_random_state_in_retries() -> None:
    """Has the exporters that are loaded by now draw from the private generator: else a collector's hiccup would move
    one rank's random state away from the others'."""
    global _modules_seen
    if len(sys.modules) == _modules_seen:
        return
    _modules_seen = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if not name.startswith(_RETRYING):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is random:
                setattr(module, attribute, GENERATOR)
            # `from random import uniform`
            elif type(value) in (MethodType, BuiltinMethodType) and value.__self__ is _global_random:
                setattr(module, attribute, getattr(GENERATOR, value.__name__))


class _Run(NamedTuple):
    number: int
    args: Callable[[], object | None] | None  # a weak reference
    word: str | None


_run: _Run | None = None  # the one that goes on, once the ranks have been asked for its word


def _word(run: int) -> str | None:
    """A random word that stands for this run on every rank that records it, whenever it began to; None where it can't
    be had. Another run of this process, a restart in it, and another launch on the same address have other words.

    Not Megatron's start time: only its own `pretrain` makes that the same on all ranks, and another run in the process
    has it again. A run begins with `pretrain`, or with other arguments of Megatron's: what a loop of one's own without
    them trains in a process is one run.
    """
    global _run
    args = state.args()
    before = _run
    if before is not None and before.number == run and (before.args is None or args is None or before.args() is args):
        return before.word
    if not store.is_up():
        if ranks.current().world_size > 1:
            return None  # not yet: don't keep that
        word: str | None = f"{GENERATOR.getrandbits(96):024x}"
    else:
        word = store.agree(before.word if before is not None else None)
        if word is None and ranks.current().world_size == 1:
            word = f"{GENERATOR.getrandbits(96):024x}"
    try:
        reference = None if args is None else weakref.ref(args)
    except TypeError:
        reference = None
    _run = _Run(run, reference, word)
    return word


def run_key(run: int) -> str | None:
    """What tells this run apart from all others and from its own restarts, the same on every rank; None where the
    ranks can't agree on it, so that there is nothing that one could call another's spans by.

    Args:
        run: The number of the run in this process, which may call `pretrain` more than once.
    """
    word = _word(run)
    return None if word is None else f"{run_id(run)}:{word}"


def run_id(run: int) -> str:
    """The id of this run, the same on every rank: NEMO_LENS_RUN_ID, else SLURM's job id, else torchrun's run id,
    else one that the ranks agree on; before torch.distributed is initialised, a hash of its address."""
    for name in ("NEMO_LENS_RUN_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        value = os.environ.get(name, "").strip()
        if value and not (name == "TORCHELASTIC_RUN_ID" and value == "none"):
            return value
    shared = _word(run) or ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return hashlib.sha256(shared.encode()).hexdigest()[:12]
