"""The settings, one row each. Their reading, `instrument()`'s keywords, Megatron's flags, the table of docs/settings.md
and the contract's check come from here; a new setting is a row, and a typed field of `config.Config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from megatron_autoinstrument.common import groups
from megatron_autoinstrument.common.registry import Registry
from megatron_autoinstrument.process import strategies
from megatron_autoinstrument.process.ranks import Rank

_N = TypeVar("_N", int, float)
_PREFIX = "MEGATRON_OTEL_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Kind(NamedTuple):
    """What a setting may be."""

    parse: Callable[[str], Any]  # raises ValueError at what can't be used
    allowed: str | Callable[[], str]  # for people


class Setting(NamedTuple):
    """A row. A variable that isn't called MEGATRON_OTEL_* is read where it is needed, or by OpenTelemetry's SDK: of its
    row `config` reads the flag alone. Where a function stands for its kind, that depends on this process's place."""

    name: str  # its variable
    meaning: str  # the words of docs/settings.md
    default: str = ""  # as the variable would have it; empty: None, and something else decides
    kind: Kind | Callable[[Rank], Kind] | None = None  # None: `config` doesn't read it
    alias: str = ""  # another variable, which this one beats
    help: str = ""  # of its flag, where Megatron's guide has one

    @property
    def field(self) -> str:
        """Its name in `config.Config`, such as `span_groups` for MEGATRON_OTEL_SPAN_GROUPS."""
        return _field(self.name)

    @property
    def flag(self) -> str:
        """Its flag on Megatron's command line, such as `--otel-span-groups`; empty where it has none."""
        return f"--otel-{self.field.replace('_', '-')}" if self.help else ""

    @property
    def keywords(self) -> list[str]:
        """Its names in `instrument()` and in the file of OTEL_CONFIG_FILE: the first that is set counts."""
        return [_field(name) for name in self._own]

    @property
    def variables(self) -> list[str]:
        """The variables that `config` reads it from: the first that is set counts."""
        return [*self._own, *(name.replace(_PREFIX, "NEMO_LENS_") for name in self._own)]

    @property
    def _own(self) -> list[str]:
        return [name for name in (self.name, self.alias) if name.startswith(_PREFIX)]


def _field(name: str) -> str:
    return name.removeprefix(_PREFIX).removeprefix("OTEL_").lower()


def _boolean(value: str) -> bool:
    lowered = value.lower()
    if lowered in TRUE:
        return True
    if lowered in FALSE:
        return False
    raise ValueError(value)


def _one_of(known: tuple[str, ...] | Registry[Any]) -> Kind:
    def parse(value: str) -> str:
        for name in (value, value.lower()):
            if name in known:
                return name
        raise ValueError(value)

    return Kind(parse, ", ".join(known) if isinstance(known, tuple) else known.names)


def _between(number: Callable[[str], _N], low: _N, high: _N, allowed: str) -> Kind:
    def parse(value: str) -> _N:
        parsed = number(value)
        if not low <= parsed <= high:  # also refuses NaN
            raise ValueError(value)
        return parsed

    return Kind(parse, allowed)


def _of_blocks(value: str) -> int:
    steps = int(value)
    if steps != 0 and steps < 4:
        raise ValueError(value)
    return steps


def _rank(place: Rank) -> Kind:
    last = place.world_size - 1
    return _between(int, -1, last, f"-1 to {last}")


BOOLEAN = Kind(_boolean, ", ".join(TRUE + FALSE))

_ROWS = (
    Setting(
        "MEGATRON_OTEL_ENABLED",
        "`1` on, `0` off for good",
        kind=BOOLEAN,
        help="Record this run with OpenTelemetry.",
    ),
    Setting(
        "OTEL_SERVICE_NAME",
        "the resource attribute `service.name`; else `megatron-lm`",
        kind=Kind(str, "any text"),
        help="The resource attribute service.name (default: megatron-lm).",
    ),
    Setting(
        "MEGATRON_OTEL_SPAN_GROUPS",
        "presets (`default`, `per_step`, `all`) and groups, with commas between them",
        default="default",
        kind=Kind(groups.parse, groups.KNOWN),
        help=f"Which spans to record: {groups.KNOWN}.",
    ),
    Setting(
        "MEGATRON_OTEL_RANK_STRATEGY",
        "`all_ranks`, `sampled`, `first_rank_per_node` or a registered name",
        default="single_rank",
        kind=_one_of(strategies.RANK_STRATEGIES),
        alias="MEGATRON_OTEL_EXPORT_STRATEGY",
    ),
    Setting(
        "MEGATRON_OTEL_EXPORT_RANK",
        "the rank of `single_rank`; -1 is the last, where Megatron has the loss",
        default="-1",
        kind=_rank,
    ),
    Setting(
        "MEGATRON_OTEL_EXPORT_SAMPLE_RATE",
        "the share of ranks of `sampled`",
        default="1.0",
        kind=_between(float, 0.0, 1.0, "a number from 0 to 1"),
    ),
    Setting("MEGATRON_OTEL_TRACES_ENABLED", "`0`: no spans", default="1", kind=BOOLEAN),
    Setting("MEGATRON_OTEL_METRICS_ENABLED", "`0`: no metrics", default="1", kind=BOOLEAN),
    Setting(
        "MEGATRON_OTEL_LOGS_ENABLED",
        "`1`: what Python's `logging` handles, tied to the span it was written in",
        default="0",
        kind=BOOLEAN,
    ),
    Setting(
        "MEGATRON_OTEL_EXCEPTION_TEXT",
        "`1`: exceptions leave with their text, which may hold paths, data and secrets; else with their types and "
        "their stacks' functions and lines",
        default="0",
        kind=BOOLEAN,
    ),
    Setting(
        "MEGATRON_OTEL_TRACE_SCOPE",
        "each step is a trace, the same one on all ranks; `run`: steps are inside the run's trace, as Megatron's "
        "guide shows them",
        default="step",
        kind=_one_of(("step", "run")),
    ),
    Setting(
        "MEGATRON_OTEL_SAMPLING_STRATEGY",
        "`rank_aware` or a registered name, in place of `OTEL_TRACES_SAMPLER`",
        kind=_one_of(strategies.SAMPLING_STRATEGIES),
    ),
    Setting(
        "MEGATRON_OTEL_EXPORTER",
        "`otlp` or `console`; else the standard `OTEL_TRACES_EXPORTER` and `OTEL_METRICS_EXPORTER`, whose `none` "
        "beats it; else `otlp`",
        kind=_one_of(("otlp", "console")),
    ),
    Setting(
        "MEGATRON_OTEL_AB",
        "`20`: blocks of 20 steps with and without this package, compared at the end; see below",
        default="0",
        kind=Kind(_of_blocks, "0, or a number of steps from 4 on"),
    ),
    Setting(
        "OTEL_CONFIG_FILE",
        "OpenTelemetry's declarative configuration (needs opentelemetry-configuration) decides alone what is exported. "
        "Settings may stand in it under `instrumentation/development: python: megatron:`, as `span_groups: all` for "
        "`MEGATRON_OTEL_SPAN_GROUPS`: there they beat variables, as its standard says, and flags beat them",
    ),
    Setting("NEMO_LENS_USER_ID", "whose run it is: the resource attribute `nemo.user.id`"),
    Setting("NEMO_LENS_RUN_ID", "the run's id; else SLURM's job id, torchrun's run id, or one that all ranks agree on"),
)

SETTINGS = {row.name: row for row in _ROWS}
