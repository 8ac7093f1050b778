"""The flags of Megatron's guide, for a Megatron that doesn't know them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_autoinstrument.settings.table import BOOLEAN, SETTINGS

MODULE = "megatron.training.arguments"
"""Megatron's module that makes the parser."""

FUNCTIONS = ("add_megatron_arguments", "_add_network_size_args")
"""Its functions that take the parser and return it. The second, one of those that the first calls, is for Megatron core
before 0.12, which has no first."""

_FLAGS = {setting.flag: setting for setting in SETTINGS.values() if setting.flag}

WITH_VALUE = [flag for flag, setting in _FLAGS.items() if setting.kind is not BOOLEAN]
"""Those that take a value; the others stand alone."""


def add(parser: Any) -> None:
    """Adds to `parser` those that it lacks: where Megatron has them, its own stay."""
    missing = [flag for flag in _FLAGS if parser is not None and flag not in parser._option_string_actions]
    if missing:
        group = parser.add_argument_group(title="opentelemetry")
        for flag in missing:
            action = "store" if flag in WITH_VALUE else "store_true"
            # A default of None, so that Megatron's `args_defaults` can set them.
            group.add_argument(flag, action=action, default=None, help=_FLAGS[flag].help)


def are_given() -> bool:
    """Whether the command line has any of them."""
    return any(word.split("=")[0] in _FLAGS for word in sys.argv)


def teach(module: Any) -> None:
    """Has Megatron's module of arguments add them, without what patching.py needs."""
    name = next((name for name in FUNCTIONS if hasattr(module, name)), None)
    if name is not None:
        setattr(module, name, _adding(getattr(module, name)))


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        add(parser)
        return parser

    return wrapper
