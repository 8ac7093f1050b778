"""The life cycle: when and on which ranks Megatron is instrumented. What is done then is elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from megatron_autoinstrument import autoload, config, groups, patching, ranks
from megatron_autoinstrument.spans import RECORDER

if TYPE_CHECKING:
    from megatron_autoinstrument.sdk import Connection

_logger = logging.getLogger(__name__)

LEDGER = patching.Ledger()


class MegatronInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # its package has no types
    """Records NVIDIA Megatron-LM training with OpenTelemetry.

    `instrument()` may come before or after Megatron is imported, and again after `uninstrument()`, also while
    training runs. What to record, and on which ranks, is told by the environment variables of
    `megatron_autoinstrument.environment_variables`. On ranks that don't export, nothing is patched.
    """

    _waiting: Any = None  # for Megatron's import

    def instrumentation_dependencies(self) -> Collection[str]:
        # A git checkout of Megatron has no package metadata, and a requirement on it would then, without a word,
        # turn us off.
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        """
        Args:
            tracer_provider: The provider to use in place of the global one. Given any, none is built by us.
            meter_provider: Likewise.
        """
        given = {name: kwargs.get(name) for name in ("tracer_provider", "meter_provider")}

        def install() -> None:
            try:
                _install(**given)
            except Exception:
                if patching.reraise_internal_errors:
                    raise
                _logger.warning("Could not instrument Megatron; nothing is recorded.", exc_info=True)

        if any(name == "megatron" or name.startswith("megatron.") for name in list(sys.modules)):
            install()
        else:
            self._waiting = autoload.before_megatron(install)

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._waiting is not None:
            autoload.forget(self._waiting)
            self._waiting = None
        LEDGER.uninstall()
        RECORDER.release()
        RECORDER.flush()


def _install(tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
    place = ranks.current()
    settings = config.from_environment(place)
    wanted = {
        **({"traces": tracer_provider} if settings.span_groups else {}),
        **({"metrics": meter_provider} if settings.metrics else {}),
    }
    if settings.enabled is False or not wanted or ranks.is_helper_process() or not ranks.exports(place, settings):
        return

    build = tracer_provider is None and meter_provider is None

    def connect() -> Connection:
        # Only now: the SDK takes long to import, and the run's id is known no earlier.
        from megatron_autoinstrument import ids, resource, sdk

        return sdk.connect(wanted, settings.exporter, resource.attributes(place, ids.run_id()), build)

    from megatron_autoinstrument.targets import SEAMS

    RECORDER.connect_by(connect)
    LEDGER.install(SEAMS, settings.span_groups | ({groups.METRICS} if settings.metrics else set()))


def _silence() -> None:
    LEDGER.silence()
    RECORDER.abandon()


# Forked children (data workers, checkpoint writers) record nothing, whatever was running when they were forked.
os.register_at_fork(after_in_child=_silence)
