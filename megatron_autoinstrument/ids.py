"""Identifiers: span and trace ids that leave training's random state alone, and the run's own id."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
from types import BuiltinMethodType, MethodType
from typing import Any

from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

from megatron_autoinstrument.environment_variables import NEMO_LENS_RUN_ID
from megatron_autoinstrument.targets import global_vars


class _Random(random.Random):
    """A generator that can stand in for the module `random` as well."""

    def __getattr__(self, name: str) -> Any:
        return getattr(random, name)


# Never Python's global generator: Megatron seeds it alike on all ranks, so that ranks would draw the same ids, and
# each span would move the state that training draws from.
_random = _Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def random_span_id() -> int:
    """A span id from the private generator."""
    return _random.getrandbits(64) or random_span_id()


class PrivateIdGenerator(IdGenerator):
    """The SDK's random ids, drawn from a generator of our own; or the ids planned for this thread's next span."""

    def __init__(self) -> None:
        self._planned = threading.local()

    def plan(self, trace_id: int | None, span_id: int | None) -> None:
        """What this thread's spans get from now on; None is a random id."""
        self._planned.trace_id, self._planned.span_id = trace_id, span_id

    def generate_span_id(self) -> int:
        planned: int | None = getattr(self._planned, "span_id", None)
        return planned or random_span_id()

    def generate_trace_id(self) -> int:
        planned: int | None = getattr(self._planned, "trace_id", None)
        return planned or _random.getrandbits(128) or self.generate_trace_id()


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
                setattr(module, attribute, _random)
            # `from random import uniform`
            elif type(value) in (MethodType, BuiltinMethodType) and value.__self__ is _global_random:
                setattr(module, attribute, getattr(_random, value.__name__))


def run_key(run: int) -> str:
    """What tells this run apart from all others and from its own restarts, the same on every rank.

    Args:
        run: The number of the run in this process, which may call `pretrain` more than once.
    """
    # After a restart that torchrun has begun on one node, its counts differ from node to node; start times do not.
    again = global_vars.start_time() or ":".join(os.environ.get(name, "") for name in _RESTARTS)
    return f"{run_id()}:{again}:{run}"


_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def run_id() -> str:
    """The id of this run, the same on every rank: NEMO_LENS_RUN_ID, else SLURM's job id, else torchrun's run id,
    else a hash of the start time that Megatron has all-reduced, else (no megatron.training) of the rendezvous."""
    for name in (NEMO_LENS_RUN_ID, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        value = os.environ.get(name, "").strip()
        if value and not (name == "TORCHELASTIC_RUN_ID" and value == "none"):
            return value
    shared = global_vars.start_time() or ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return hashlib.sha256(str(shared).encode()).hexdigest()[:12]
