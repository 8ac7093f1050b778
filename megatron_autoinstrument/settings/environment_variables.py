"""The environment variables that this package reads. The standard `OTEL_*` ones are read by the SDK.

Each `MEGATRON_OTEL_X` falls back to `NEMO_LENS_X`, the name that Megatron's own telemetry shares.
An empty value counts as unset.
"""

MEGATRON_OTEL_ENABLED = "MEGATRON_OTEL_ENABLED"
"""1 turns the instrumentation on, 0 off for good: set by hand to 0 it beats every other way of turning it on.
Under `opentelemetry-instrument`, and after a call of `instrument()`, unset means on."""

MEGATRON_OTEL_RANK_STRATEGY = "MEGATRON_OTEL_RANK_STRATEGY"
"""Which ranks record and export: `single_rank` (default), `all_ranks`, `sampled`, `first_rank_per_node`
or a registered name."""

MEGATRON_OTEL_EXPORT_STRATEGY = "MEGATRON_OTEL_EXPORT_STRATEGY"
"""Another name for MEGATRON_OTEL_RANK_STRATEGY, which wins where both are set."""

MEGATRON_OTEL_EXPORT_RANK = "MEGATRON_OTEL_EXPORT_RANK"
"""The rank of `single_rank`; -1 (default) is the last, where Megatron has the loss."""

MEGATRON_OTEL_EXPORT_SAMPLE_RATE = "MEGATRON_OTEL_EXPORT_SAMPLE_RATE"
"""The share of ranks of `sampled`, from 0 to 1 (default 1.0)."""

MEGATRON_OTEL_SAMPLING_STRATEGY = "MEGATRON_OTEL_SAMPLING_STRATEGY"
"""`rank_aware` or a registered name: the sampler of a provider of ours. Unset leaves OTEL_TRACES_SAMPLER's."""

MEGATRON_OTEL_TRACES_ENABLED = "MEGATRON_OTEL_TRACES_ENABLED"
"""0 turns spans off (default 1)."""

MEGATRON_OTEL_METRICS_ENABLED = "MEGATRON_OTEL_METRICS_ENABLED"
"""0 turns metrics off (default 1)."""

MEGATRON_OTEL_LOGS_ENABLED = "MEGATRON_OTEL_LOGS_ENABLED"
"""1 exports what Python's `logging` handles (default 0)."""

MEGATRON_OTEL_EXCEPTION_TEXT = "MEGATRON_OTEL_EXCEPTION_TEXT"
"""1 sends the text of exceptions and lines of source (default 0: their types, and functions and lines of their stacks).
It may hold whatever the program put into it: paths, data, secrets."""

MEGATRON_OTEL_SPAN_GROUPS = "MEGATRON_OTEL_SPAN_GROUPS"
"""Which spans: presets and groups with commas between them, such as `default,microbatch` (default: `default`)."""

MEGATRON_OTEL_TRACE_SCOPE = "MEGATRON_OTEL_TRACE_SCOPE"
"""`step` (default): each step is a trace, the same one on every rank. `run`: steps belong to the run's trace."""

MEGATRON_OTEL_AB = "MEGATRON_OTEL_AB"
"""The length of the blocks of steps with and without instrumentation that are compared; unset or 0: no comparison."""

MEGATRON_OTEL_EXPORTER = "MEGATRON_OTEL_EXPORTER"
"""`otlp` (default) or `console`: where spans go if the application set no tracer provider. The standard
OTEL_TRACES_EXPORTER, which knows more exporters, is followed where this is unset."""

NEMO_LENS_RUN_ID = "NEMO_LENS_RUN_ID"
"""The id of the run. Unset: SLURM's job id, else torchrun's run id, else one worked out from the run itself."""

NEMO_LENS_USER_ID = "NEMO_LENS_USER_ID"
"""A label of whose run it is: the resource attribute nemo.user.id."""
