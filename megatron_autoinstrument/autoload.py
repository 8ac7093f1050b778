"""What runs where nobody calls `instrument()`: the wheel's `.pth` line, and our part in torchrun's launcher.

Next to nothing until Megatron is imported: it loads in every Python process, and imports what it needs only then.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


class _BeforeMegatron:
    """A finder that finds nothing, but is asked before anything of Megatron is imported.

    It stays in sys.meta_path when its work is done: whoever leaves while the import system walks that list makes it
    skip another.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        if self.call is not None and (name == "megatron" or name.startswith("megatron.")):
            call, self.call = self.call, None
            try:
                call()
            except Exception:  # noqa: BLE001
                from megatron_autoinstrument.common.redact import get_logger

                get_logger(__name__).warning("Could not instrument Megatron; nothing is recorded.", exc_info=True)


def before_megatron(call: Callable[[], None]) -> _BeforeMegatron:
    """Has `call` run once, when Megatron is about to be imported."""
    finder = _BeforeMegatron(call)
    sys.meta_path.insert(0, finder)
    return finder


def forget(finder: _BeforeMegatron) -> None:
    """Takes `before_megatron` back."""
    finder.call = None


def from_pth() -> None:
    """The `.pth` line comes here where MEGATRON_OTEL_ENABLED or NEMO_LENS_ENABLED has a value or a flag is ours; in a
    virtual environment perhaps twice."""
    if not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        before_megatron(_instrument_if_enabled)


def _instrument_if_enabled() -> None:
    flagged = any(argument.startswith("--otel-") for argument in sys.argv)
    if flagged:
        teach_flags()
    from megatron_autoinstrument.process import ranks
    from megatron_autoinstrument.settings import config

    place, known = ranks.look()
    told = known > ranks.Known.GUESSED
    on = config.enabled(warn=told and place.rank == 0)
    # A value that is neither is named once the rank that does so is known: with Megatron's arguments.
    if on is False or (told and not (on or flagged)):
        return
    from megatron_autoinstrument import MegatronInstrumentor

    if MegatronInstrumentor().is_instrumented_by_opentelemetry:
        return
    if on or "--otel-enabled" in sys.argv:
        MegatronInstrumentor().instrument()
    else:
        from megatron_autoinstrument.instrumentor import accept_flags

        accept_flags()


# Those that start a rank's processes themselves: scripts, and modules after `python -m`.
_LAUNCHERS = (
    *("torchrun", "ft_launcher", "accelerate", "accelerate-launch"),
    *("torch.distributed.run", "torch.distributed.launch", "nvidia_resiliency_ext.fault_tolerance.launcher"),
    "accelerate.commands.launch",
)
_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python's


def _program(command: list[str]) -> str:
    """What a command line of Python's runs: the name of the script or module; empty for code."""
    words = iter(command[1:])
    for word in words:
        if word in _WITH_A_VALUE:
            next(words, None)
        elif word.startswith("-c") or word == "-":
            return ""
        elif word.startswith("-") and word.endswith("m") and not word.startswith("--"):
            return next(words, "")
        elif not word.startswith("-"):
            return os.path.basename(word)
    return ""


def teach_flags() -> None:
    """Lets Megatron's parser know our flags: an unmodified Megatron exits on them. It takes nothing of OpenTelemetry,
    and does without wrapt where that can't be imported, so that no fault elsewhere stops training there."""
    try:
        from megatron_autoinstrument.targets import arguments

        arguments.teach()
    except Exception:  # noqa: BLE001
        if not any(isinstance(finder, _TeachingFlags) for finder in sys.meta_path):
            sys.meta_path.insert(0, _TeachingFlags())


class _TeachingFlags:
    """A finder of Megatron's arguments alone, which has their module know our flags once it is executed."""

    def __init__(self) -> None:
        from importlib.machinery import PathFinder

        from megatron_autoinstrument.settings import flags

        self._find, self._flags = PathFinder.find_spec, flags

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        spec = self._find(name, path, target) if name == self._flags.MODULE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_teach(module: ModuleType) -> None:
                execute(module)
                self._flags.teach(module)

            spec.loader.exec_module = execute_and_teach  # type: ignore[method-assign]
        return spec


def keep_for_workers() -> None:
    """Lets torchrun's workers be instrumented as their launcher is.

    Before opentelemetry-instrumentation 0.63b0 a process that `opentelemetry-instrument` started takes that out of
    PYTHONPATH, and its children start bare. This is an `opentelemetry_post_instrument` entry point: it runs after
    that, and in a launcher puts it back. A rank's own children are left as they are. RANK in the environment makes
    no rank: the shell or pod that a launcher is started in may have it, and mean a node by it.
    """
    if _program(sys.orig_argv) not in _LAUNCHERS:
        return
    import importlib.util

    from megatron_autoinstrument.instrumentor import MegatronInstrumentor
    from megatron_autoinstrument.settings import config

    if config.enabled(warn=False) is False:
        return

    spec = importlib.util.find_spec("opentelemetry.instrumentation.auto_instrumentation")
    if spec is None or spec.origin is None or not MegatronInstrumentor().is_instrumented_by_opentelemetry:
        return
    entry = os.path.dirname(os.path.abspath(spec.origin))
    python_path = os.environ.get("PYTHONPATH", "")
    # It was there at start: sys.path still has it.
    if entry in sys.path and entry not in python_path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([entry, python_path]) if python_path else entry
