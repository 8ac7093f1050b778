"""What is read of OpenTelemetry's private parts: in one module alone, and found in the release that is installed."""

import ast
import re
from collections import deque
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, TraceFlags

import megatron_autoinstrument
from megatron_autoinstrument.export import sdk_internals
from megatron_autoinstrument.export.losses import is_as_shipped

ROOT = Path(megatron_autoinstrument.__file__).parent
RELEASE = tuple(map(int, version("opentelemetry-sdk").split(".")[:2]))
logs_sdk = import_module(sdk_internals.LOGS_SDK)
logs_export = import_module(f"{sdk_internals.LOGS_SDK}.export")

ELSEWHERE = {
    "settings/declarative.py: opentelemetry.sdk._configuration.file": "a reader of settings, which lie below export/",
    # Not OpenTelemetry's.
    "export/direct.py: span.made_of[0]._hand_on_finished": "this package's",
    "export/providers.py: connection._watch": "this package's",
    "instrumentor.py: MegatronInstrumentor()._given": "this package's",
    "megatron/patching.py: self._beside._made": "this package's",
    "process/signals.py: TERMINATION._before": "this package's",
    "process/strategies.py: place._replace": "a named tuple's, and public",
    "recording/journal.py: Slot._make": "a named tuple's, and public",
    "megatron/patching.py: sys._getframe": "Python's",
    "megatron/patching.py: getattr(module, '__spec__', None)._initializing": "Python's",
    "settings/flags.py: parser._option_string_actions": "argparse's",
    "targets/rl_utils.py: os._exit": "Python's, and public",
    "megatron/state.py: module._GLOBAL_ARGS": "Megatron's",
    "process/ranks.py: sys.modules.get('megatron.training.global_vars')._GLOBAL_ARGS": "Megatron's",
    "megatron/torch_state.py: sys.modules['torch._C']._current_graph_task_id": "torch's",
    "process/store.py: torch._get_default_store": "torch's",
}
"""What else has a name that begins with an underscore, and why it may."""

PRIVATE = re.compile(r"_[A-Za-z]\w*")
PRIVATE_MODULE = re.compile(r"opentelemetry(\.\w+)*\._[\w.]+")


def reads(tree, anything_named_so):
    """What of others' private parts it reads, imports or names.

    Args:
        tree: The syntax of a module.
        anything_named_so: Whether a string or keyword that is a private name is taken for one of theirs.
    """
    nodes = list(ast.walk(tree))
    pieces = {piece for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in nodes:
        if node in pieces:
            continue
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield f"{ast.unparse(node.value)}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and PRIVATE.fullmatch(name.value) and not anything_named_so:
                yield f"{ast.unparse(node.args[0])}.{name.value}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if PRIVATE_MODULE.fullmatch(name := f"{node.module}.{alias.name}"):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if PRIVATE_MODULE.fullmatch(alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if PRIVATE_MODULE.fullmatch(node.value) or (anything_named_so and PRIVATE.fullmatch(node.value)):
                yield node.value
        elif isinstance(node, ast.keyword) and anything_named_so and PRIVATE.fullmatch(node.arg or ""):
            yield node.arg


def test_no_other_module_reads_private_parts_of_the_sdk():
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {what}"
        for path in ROOT.rglob("*.py")
        if path.name != "sdk_internals.py"
        for what in reads(ast.parse(path.read_text()), path.parent.name == "export")
    }
    assert found == set(ELSEWHERE)


@pytest.mark.parametrize(
    "source",
    [
        "provider._resource",
        "super()._readable_span()",
        "getattr(provider, '_resource', None)",
        "setattr(span, '_events', ())",
        "from opentelemetry.sdk import _logs",
        "from opentelemetry.sdk._logs import LoggerProvider",
        "import opentelemetry._logs",
        "import_module('opentelemetry.sdk._logs.export')",
    ],
)
def test_each_way_to_read_a_private_part_is_seen(source):
    assert list(reads(ast.parse(source), False))


def test_names_for_later_are_seen_in_export():
    assert list(reads(ast.parse("NAMES = ('_queue',)\nvars(span).update(_context=1)"), True)) == ["_queue", "_context"]


class Sink:
    """An exporter of any signal."""

    def export(self, batch, **options):
        pass

    def shutdown(self, **options):
        pass

    def force_flush(self, **options):
        return True


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def ended(exporter, provider):
    """A span that ended, as it is exported."""
    context = SpanContext(1, 2, False, TraceFlags(1))
    provider.get_tracer("x").start_span("a", attributes={"b": 1}, links=[Link(context)]).end()
    return exporter.get_finished_spans()[0]


@pytest.fixture
def closing():
    """Shuts down at the end."""
    open_ones = []
    yield lambda provider: open_ones.append(provider) or provider
    for one in open_ones:
        one.shutdown()


def of_traces(sink):
    provider = TracerProvider(shutdown_on_exit=False)
    holders = [SimpleSpanProcessor(sink), BatchSpanProcessor(sink)]
    for holder in holders:
        provider.add_span_processor(holder)
    return provider, holders


def of_metrics(sink):
    holders = [PeriodicExportingMetricReader(ConsoleMetricExporter(), 3_600_000), InMemoryMetricReader()]
    return MeterProvider(holders, shutdown_on_exit=False), holders


def of_logs(sink):
    provider = logs_sdk.LoggerProvider(shutdown_on_exit=False)
    holders = [logs_export.SimpleLogRecordProcessor(sink), logs_export.BatchLogRecordProcessor(sink)]
    for holder in holders:
        provider.add_log_record_processor(holder)
    return provider, holders


@pytest.mark.parametrize("of_signal", [of_traces, of_metrics, of_logs])
def test_a_providers_holders_are_found_and_its_resource_can_be_replaced(of_signal, sink, closing):
    provider, holders = of_signal(sink)
    closing(provider)
    assert sdk_internals.holders_of(provider) == holders
    assert sdk_internals.holders_of(object()) is None
    described = sdk_internals.resource_of(provider).merge(Resource({"dl.rank": 3}))
    sdk_internals.set_resource(provider, described)
    assert sdk_internals.resource_of(provider).attributes == described.attributes
    if of_signal is not of_metrics:  # which has no public place for it
        assert provider.resource.attributes == described.attributes


@pytest.mark.parametrize("of_signal", [of_traces, of_logs])
def test_processors_have_an_exporter_and_those_of_batches_a_queue(of_signal, sink, closing):
    provider, (simple, batch) = of_signal(sink)
    closing(provider)
    assert sdk_internals.exporter_of(simple) is sdk_internals.exporter_of(batch) is sink
    assert sdk_internals.inner_of(simple) is simple
    assert (sdk_internals.inner_of(batch) is not batch) == (RELEASE >= (1, 34))
    assert sdk_internals.queue_of(simple) is None
    assert type(sdk_internals.queue_of(batch)) is deque
    assert sdk_internals.queue_of(batch).maxlen


def test_a_reader_has_an_exporter(closing):
    exporter = ConsoleMetricExporter()
    reader = PeriodicExportingMetricReader(exporter, 3_600_000)
    closing(MeterProvider([reader], shutdown_on_exit=False))
    assert sdk_internals.exporter_of(reader) is exporter
    assert sdk_internals.exporter_of(InMemoryMetricReader()) is None


def test_a_span_goes_through_the_intake_into_the_queue(sink, ended, closing, caplog):
    batch = closing(BatchSpanProcessor(sink, 2, 3_600_000, 2))
    assert all(map(is_as_shipped, sdk_internals.intake_of(batch)))
    assert len(sdk_internals.intake_of(batch)) == (2 if RELEASE >= (1, 34) else 1)
    batch.on_end(ended)
    queue = sdk_internals.queue_of(batch)
    assert list(queue) == [ended]
    queue.append(ended)
    batch.on_end(ended)
    said = [message for message in caplog.messages if message.startswith(sdk_internals.QUEUE_IS_FULL)]
    assert len(said) == (0 if (1, 34) <= RELEASE < (1, 40) else 1)


def test_an_otlp_exporter_has_the_methods_that_are_looked_at():
    assert all(is_as_shipped(getattr(OTLPSpanExporter, name)) for name in sdk_internals.EXPORT_METHODS)


def test_a_tracer_shows_what_its_spans_are_made_with(sink, closing):
    provider = closing(TracerProvider(span_limits=SpanLimits(max_links=7), shutdown_on_exit=False))
    tracer = provider.get_tracer("x")
    assert sdk_internals.multi_processor_of(provider) is tracer.span_processor
    before = sdk_internals.processors_behind(tracer)
    assert before is sdk_internals.processors_behind(tracer)
    provider.add_span_processor(one := SimpleSpanProcessor(sink))
    assert sdk_internals.processors_behind(tracer) == (*before, one)
    assert sdk_internals.scope_of(tracer).name == "x"
    assert sdk_internals.limits_of(tracer).max_links == 7


def test_a_tracer_that_is_turned_off_is_not_enabled(closing, monkeypatch):
    tracer = closing(TracerProvider(shutdown_on_exit=False)).get_tracer("x")
    assert hasattr(tracer, "_is_enabled") == (RELEASE >= (1, 40))
    assert sdk_internals.is_enabled(tracer)
    monkeypatch.setattr(tracer, "_is_enabled", lambda: False, raising=False)
    assert not sdk_internals.is_enabled(tracer)


@pytest.mark.parametrize("asked", ["false", "true"])
def test_a_tracer_says_whether_it_counts_spans(asked, closing, monkeypatch):
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", asked)
    tracer = closing(TracerProvider(shutdown_on_exit=False)).get_tracer("x")
    always = (1, 40) <= RELEASE < (1, 42)
    assert sdk_internals.counts_spans(tracer) == (always or (asked == "true" and RELEASE >= (1, 42)))


def test_the_fields_of_a_span_are_those_that_it_shows(ended):
    context, parent, events, links, status, attributes, kind, name, start, end = sdk_internals.fields_of(ended)
    assert context is ended.context
    assert (parent, tuple(events), tuple(links), status) == (ended.parent, (), ended.links, ended.status)
    assert (attributes, kind, name) == (ended.attributes, ended.kind, "a")
    assert (start, end) == (ended.start_time, ended.end_time)
    assert len(links) == 1


def test_a_span_is_started_without_a_tracer():
    context = SpanContext(1, 2, False, TraceFlags(1))
    span = sdk_internals.StartedSpan("a", context)
    assert vars(span)[sdk_internals.CONTEXT] is span.get_span_context() is context
    sdk_internals.set_times(span, 3, None)
    assert (span.start_time, span.end_time) == (3, None)
    sdk_internals.set_times(span, 3, 4)
    ended = sdk_internals.readable_of(span)
    assert (ended.name, ended.start_time, ended.end_time) == ("a", 3, 4)
    _, _, events, links, *_ = sdk_internals.fields_of(ended)
    assert events == links == ()  # and not the SDK's bounded lists


def test_contexts_are_tuples():
    assert sdk_internals.CONTEXTS_ARE_TUPLES


class Own(sampling.Sampler):
    def should_sample(self, *args, **kwargs):
        return sampling.SamplingResult(sampling.Decision.RECORD_AND_SAMPLE)

    def get_description(self):
        return "somebody's"


ON, OFF, BY_PARENT = sampling.ALWAYS_ON, sampling.ALWAYS_OFF, sampling.ParentBased


@pytest.mark.parametrize(
    ("sampler", "keeps_inside", "drops_inside", "keeps_root"),
    [
        (ON, True, True, True),
        (OFF, True, True, False),
        (sampling.TraceIdRatioBased(1), True, True, True),
        (Own(), False, False, None),
        (BY_PARENT(ON), True, True, True),
        (BY_PARENT(OFF), True, True, False),
        (BY_PARENT(sampling.TraceIdRatioBased(0)), True, True, False),
        (BY_PARENT(Own()), True, True, None),
        (BY_PARENT(ON, local_parent_sampled=OFF), False, True, True),
        (BY_PARENT(ON, local_parent_sampled=Own()), False, True, True),
        (BY_PARENT(ON, local_parent_not_sampled=ON), True, False, True),
    ],
)
def test_a_sampler_is_known_by_its_parts(sampler, keeps_inside, drops_inside, keeps_root):
    assert sdk_internals.keeps_what_is_inside(sampler) == keeps_inside
    assert sdk_internals.drops_what_is_inside(sampler) == drops_inside
    keeps = sdk_internals.keeps_roots(sampler)
    assert (keeps if keeps is None else keeps(1 << 127)) is keeps_root
