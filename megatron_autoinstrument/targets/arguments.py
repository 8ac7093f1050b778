"""megatron/training/arguments.py: the flags of Megatron's guide, for those that don't know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.groups import FLAGS, GROUPS, PRESETS
from megatron_autoinstrument.patching import Arguments, Function, Hook, Seam

_MODULE = "megatron.training.arguments"

# A default of None, so that Megatron's `args_defaults` can set them.
_FLAGS: dict[str, dict[str, Any]] = {
    "--otel-enabled": {"action": "store_true", "help": "Record this run with OpenTelemetry."},
    "--otel-service-name": {"type": str, "help": "The resource attribute service.name (default: megatron-lm)."},
    "--otel-span-groups": {
        "type": str,
        "help": f"Which spans to record: presets ({', '.join(PRESETS)}) and groups ({', '.join(GROUPS)}), "
        "with commas between them.",
    },
}


def _adding(original: Function, groups: frozenset[str]) -> Hook:
    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
        return True

    def end(token: Any, parser: Any, error: BaseException | None) -> None:
        # Where Megatron has them, its own stay.
        missing = [flag for flag in _FLAGS if parser is not None and flag not in parser._option_string_actions]
        if missing:
            group = parser.add_argument_group(title="opentelemetry")
            for flag in missing:
                group.add_argument(flag, default=None, **_FLAGS[flag])

    return Hook(begin, end)


SEAMS = (
    Seam(_MODULE, "add_megatron_arguments", {FLAGS}, _adding),
    # Before core 0.12: the first of those that add to the parser.
    Seam(_MODULE, "_add_network_size_args", {FLAGS}, _adding, unless="add_megatron_arguments"),
)
