"""What runs where nobody calls `instrument()`: the wheel's `.pth` line, and our part in torchrun's launcher.

Standard library only, and next to nothing until Megatron is imported: it loads in every Python process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _BeforeMegatron:
    """A finder that finds nothing, but is asked before anything of Megatron is imported."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        # It stays in sys.meta_path: whoever leaves while the import system walks that list makes it skip another.
        if self._call is not None and (name == "megatron" or name.startswith("megatron.")):
            call, self._call = self._call, None
            call()


def before_megatron(call: Callable[[], None]) -> _BeforeMegatron:
    """Has `call` run once, when Megatron is about to be imported. It must not raise."""
    finder = _BeforeMegatron(call)
    sys.meta_path.insert(0, finder)
    return finder


def forget(finder: _BeforeMegatron) -> None:
    """Takes `before_megatron` back."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


def from_pth() -> None:
    """The `.pth` line comes here where MEGATRON_OTEL_ENABLED or NEMO_LENS_ENABLED has a value; in a virtual
    environment perhaps twice."""
    if not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        before_megatron(_instrument_if_enabled)


def _instrument_if_enabled() -> None:
    from megatron_autoinstrument import config, ranks
    from megatron_autoinstrument.instrumentor import MegatronInstrumentor

    instrumentor = MegatronInstrumentor()
    if config.from_environment(ranks.current()).enabled and not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument()


def keep_for_workers() -> None:
    """Lets torchrun's workers be instrumented as their launcher is.

    Before opentelemetry-instrumentation 0.63b0 a process that `opentelemetry-instrument` started takes that out of
    PYTHONPATH, and its children start bare. This is an `opentelemetry_post_instrument` entry point: it runs after
    that, in the launcher too, where it is put back. A rank's own children are left as they are.
    """
    if "RANK" in os.environ:
        return
    from megatron_autoinstrument import config, ranks
    from megatron_autoinstrument.instrumentor import MegatronInstrumentor

    if not MegatronInstrumentor().is_instrumented_by_opentelemetry:
        return  # its name is in OTEL_PYTHON_DISABLED_INSTRUMENTATIONS
    if config.from_environment(ranks.current()).enabled is False:
        return
    spec = importlib.util.find_spec("opentelemetry.instrumentation.auto_instrumentation")
    if spec is None or spec.origin is None:
        return
    entry = os.path.dirname(os.path.abspath(spec.origin))
    python_path = os.environ.get("PYTHONPATH", "")
    # It was there at start: sys.path still has it.
    if entry in sys.path and entry not in python_path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([entry, python_path]) if python_path else entry
