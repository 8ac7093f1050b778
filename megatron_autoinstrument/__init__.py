"""OpenTelemetry instrumentation for NVIDIA Megatron-LM that touches nothing of Megatron's source."""

from __future__ import annotations

from megatron_autoinstrument.version import __version__

TYPE_CHECKING = False  # typing's own takes long to import
if TYPE_CHECKING:
    from typing import Any

    from megatron_autoinstrument.instrumentor import MegatronInstrumentor
    from megatron_autoinstrument.process.strategies import register_rank_strategy, register_sampling_strategy

__all__ = ["MegatronInstrumentor", "__version__", "register_rank_strategy", "register_sampling_strategy"]

_HOMES = {
    "MegatronInstrumentor": "instrumentor",
    "register_rank_strategy": "process.strategies",
    "register_sampling_strategy": "process.strategies",
}


def __getattr__(name: str) -> Any:
    # The wheel's .pth line imports this package in every Python process; OpenTelemetry it must not.
    if name in _HOMES:
        import importlib

        try:
            from megatron_autoinstrument.settings import standard

            with standard.tidied(empty_alone=True):  # OpenTelemetry reads some of them when it is imported
                return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        except Exception as error:
            if name != "MegatronInstrumentor":
                raise
            from megatron_autoinstrument import unavailable

            unavailable.reason = f"{type(error).__name__}: {error}"
            return unavailable.MegatronInstrumentor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
