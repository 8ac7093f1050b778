"""Megatron's own telemetry, which its main branch has and no release up to core 0.19: whether it is in our way."""

from __future__ import annotations

import importlib.util
import os
import sys

from megatron_autoinstrument.settings import config


def is_here() -> bool:
    """Whether this Megatron has spans of its own (`megatron.core.telemetry`) and what they need (nemo-lens) is
    installed. Nothing is imported: Megatron may be about to be."""
    return _has("megatron", "core", "telemetry") and _has("nemo", "lens")


def is_asked_for() -> bool:
    """Whether it is turned on: by the same variable as we are, or by its flag."""
    return bool(config.enabled(warn=False)) or "--otel-enabled" in sys.argv


def _has(package: str, *inside: str) -> bool:
    # A look at the folders: to find a submodule, find_spec would import its parents.
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return any(os.path.isdir(os.path.join(path, *inside)) for path in (spec and spec.submodule_search_locations) or ())
