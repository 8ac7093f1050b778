"""What stands in for MegatronInstrumentor where the packages that recording needs can't be imported."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from megatron_autoinstrument import autoload
from megatron_autoinstrument.base import BaseInstrumentor
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.process import ranks
from megatron_autoinstrument.settings import config

_logger = get_logger(__name__)

reason = ""
"""Why it can't be done: the package sets it."""


class MegatronInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # its package has no types
    """Records nothing, says once why, and has Megatron's parser know the flags all the same."""

    _said = True  # what the base class says is said below
    _told = False

    def instrumentation_dependencies(self) -> Collection[str]:
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        autoload.teach_flags()
        if not self._told and config.enabled(warn=False) is not False and ranks.current().rank == 0:
            self._told = True
            _logger.warning("Could not instrument Megatron; nothing is recorded. %s", reason)

    def _uninstrument(self, **kwargs: Any) -> None:
        pass

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes nothing out, as nothing is in."""
        yield
