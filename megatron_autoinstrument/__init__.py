"""OpenTelemetry instrumentation for NVIDIA Megatron-LM that touches nothing of Megatron's source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_autoinstrument.version import __version__

if TYPE_CHECKING:
    from megatron_autoinstrument.instrumentor import MegatronInstrumentor

__all__ = ["MegatronInstrumentor", "__version__"]


def __getattr__(name: str) -> Any:
    # The wheel's .pth line imports this package in every Python process; OpenTelemetry it must not.
    if name == "MegatronInstrumentor":
        from megatron_autoinstrument.instrumentor import MegatronInstrumentor

        return MegatronInstrumentor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
