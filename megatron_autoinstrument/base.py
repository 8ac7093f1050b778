"""`BaseInstrumentor`, or what does its work where OpenTelemetry's can't be imported: a propagator that nobody has
installed, named in OTEL_PROPAGATORS, is enough for that, and recording takes no propagator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.process import ranks

_logger = get_logger(__name__)

_MESSAGE = "opentelemetry.instrumentation can't be imported, and Megatron is instrumented without it. %s"

try:
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor as BaseInstrumentor  # type: ignore[attr-defined]
except Exception as error:  # noqa: BLE001
    _reason = f"{type(error).__name__}: {error}"

    if not TYPE_CHECKING:

        class BaseInstrumentor:
            """One object per class, instrumented or not."""

            _instance = None
            _said = False
            is_instrumented_by_opentelemetry = False

            def __new__(cls) -> BaseInstrumentor:
                if cls._instance is None:
                    cls._instance = super().__new__(cls)
                return cls._instance

            def instrument(self, **kwargs: Any) -> None:
                if not self._said:
                    self._said = True
                    if ranks.current().rank == 0:
                        _logger.warning(_MESSAGE, _reason)
                if not self.is_instrumented_by_opentelemetry:
                    for name in ("skip_dep_check", "raise_exception_on_conflict"):
                        kwargs.pop(name, None)
                    self._instrument(**kwargs)
                    self.is_instrumented_by_opentelemetry = True

            def uninstrument(self, **kwargs: Any) -> None:
                if self.is_instrumented_by_opentelemetry:
                    self._uninstrument(**kwargs)
                    self.is_instrumented_by_opentelemetry = False
