"""The global providers, each of which can be set only once in a process, and what a process' end makes of them."""

import os
import subprocess
import sys
import time

import pytest


def fresh_process(code, **environment):
    """What `code` prints in a process of its own: the global provider can be set only once in each."""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


CONNECT = """
from megatron_autoinstrument.export import providers
connection = providers.connect({{"traces": None}}, {exporter!r}, {{"service.name": "megatron-lm", "dl.rank": 3}})
provider = connection._providers["traces"]
"""


def test_the_applications_global_provider_is_used_and_never_replaced():
    out, err = fresh_process(
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "theirs = TracerProvider(); trace.set_tracer_provider(theirs)\n"
        + CONNECT.format(exporter=None)
        + "print(provider is theirs is trace.get_tracer_provider(), bool(providers._built), connection.exit_timeout_s)"
    )
    assert out == "True False 10.0"
    assert not err


def test_without_a_provider_ours_exports_otlp_over_grpc_and_is_global():
    out, err = fresh_process(
        "from opentelemetry import trace\n"
        + CONNECT.format(exporter=None)
        + "processor = provider._active_span_processor._span_processors[0]\n"
        "print(trace.get_tracer_provider() is provider, bool(providers._built), connection.exit_timeout_s)\n"
        "print(type(processor.span_exporter).__module__, provider.resource.attributes['dl.rank'])\n"
        "print(type(provider.id_generator).__name__)\n"
        "connection.flush_spans(final=True)"
    )
    assert out.split("\n") == [
        "True True 5.0",
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter 3",
        "PrivateIdGenerator",
    ]
    assert not err


@pytest.mark.parametrize(
    ("exporter", "environment", "expected"),
    [
        ("console", {}, "ConsoleSpanExporter"),
        (None, {"OTEL_TRACES_EXPORTER": "console"}, "ConsoleSpanExporter"),
        ("console", {"OTEL_TRACES_EXPORTER": "otlp"}, "ConsoleSpanExporter"),
        ("otlp", {"OTEL_TRACES_EXPORTER": "console"}, "OTLPSpanExporter"),
        (None, {"OTEL_TRACES_EXPORTER": "none"}, "nothing"),
        ("otlp", {"OTEL_TRACES_EXPORTER": "none"}, "nothing"),
    ],
)
def test_the_exporter_is_the_one_asked_for(exporter, environment, expected):
    out, _ = fresh_process(
        CONNECT.format(exporter=exporter)
        + "made = [type(p.span_exporter).__name__ for p in provider._active_span_processor._span_processors]\n"
        "print(*made or ['nothing'])\nconnection.flush_spans(final=True)",
        **environment,
    )
    assert out == expected


def test_the_standard_sampler_variables_are_followed():
    out, _ = fresh_process(
        CONNECT.format(exporter="console") + "print(provider.sampler.get_description())",
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.25",
    )
    assert "TraceIdRatioBased{0.25}" in out


def test_our_provider_has_no_unbounded_shutdown_at_exit_left():
    # Nobody listens: the stock SDK's own shutdown alone waits for 6 s.
    out, _ = fresh_process(
        "import atexit, time\n"
        "atexit.register(lambda: print(time.monotonic() - start < 4))\n"
        + CONNECT.format(exporter="otlp")
        + "connection.tracer.start_span('x').end()\nstart = time.monotonic()",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
    )
    assert out == "True"


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_forked_child_repeats_no_metrics(whose):
    out, _ = fresh_process(
        """
import os, sys, time
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from megatron_autoinstrument.export import providers

class Exporter(ConsoleMetricExporter):
    def export(self, *args, **kwargs):
        os.write(1, f"exported by {os.getpid()}\\n".encode())
        return super().export(*args, **kwargs)

if os.environ["WHOSE"] == "theirs":
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(Exporter(), export_interval_millis=50)]))
else:
    providers._component = lambda kind, name: Exporter
connection = providers.connect({"metrics": None}, "console", {})
connection.meter.create_counter("steps").add(1)
pid = os.fork()
if pid == 0:
    time.sleep(0.5)
    os._exit(0)
os.waitpid(pid, 0)
metrics.get_meter_provider().force_flush()
print("parent", os.getpid() , flush=True)
os._exit(0)
""",
        OTEL_METRIC_EXPORT_INTERVAL="50",
        WHOSE=whose,
    )
    parent = out.rsplit("parent ", 1)[1]
    assert {line for line in out.splitlines() if line.startswith("exported by")} == {f"exported by {parent}"}


def test_a_forked_child_of_the_application_exports_its_own_metrics_and_none_of_this_package():
    out, _ = fresh_process(
        """
import os
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from megatron_autoinstrument.export import providers

class Exporter(ConsoleMetricExporter):
    def export(self, data, *args, **kwargs):
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    os.write(1, f"{who} {metric.name}\\n".encode())

who = "parent"
metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(Exporter())]))
connection = providers.connect({"metrics": None}, None, {})
connection.meter.create_counter("megatron.steps").add(1)
metrics.get_meter("theirs").create_counter("theirs").add(1)
if (pid := os.fork()) == 0:
    who = "child"
    metrics.get_meter_provider().force_flush()
    os._exit(0)
os.waitpid(pid, 0)
metrics.get_meter_provider().force_flush()
os._exit(0)
"""
    )
    assert sorted(out.splitlines()) == ["child theirs", "parent megatron.steps", "parent theirs"]


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin_v1"}, "zipkin_v1"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier/pigeon"}, "carrier/pigeon"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "abc"}, "abc"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "10"}, ""),
    ],
)
def test_what_cannot_be_built_leaves_no_half_built_provider_behind(environment, named):
    out, err = fresh_process(
        "from opentelemetry import trace\nfrom megatron_autoinstrument.export import providers\n"
        "connection = providers.connect({'traces': None}, None, {})\nconnection.tracer.start_span('x').end()\n"
        "print(type(trace.get_tracer_provider()).__name__)",
        **environment,
    )
    assert out == "ProxyTracerProvider"
    assert "No traces are recorded: OpenTelemetry could not be set up for them." in err
    assert named in err


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("opentelemetry._logs", "No logs are recorded"),
        ("opentelemetry.sdk._logs", "No logs are recorded"),
        ("opentelemetry.sdk._logs.export", "No logs are recorded"),
        ("opentelemetry.sdk.trace.SynchronousMultiSpanProcessor", "Spans are made by the SDK's tracer"),
    ],
)
def test_what_a_later_release_takes_away_costs_no_span_and_no_metric(gone, said):
    out, err = fresh_process(
        f"""
import logging, sys
logging.basicConfig(level=logging.INFO)
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))
module, _, name = {gone!r}.rpartition(".")
if name[0].isupper():
    delattr(sys.modules[module], name)
else:
    for name in [name for name in sys.modules if (name + ".").startswith({gone!r} + ".")]:
        del sys.modules[name]
    sys.modules[{gone!r}] = None

from megatron_autoinstrument.export import providers
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import FREQUENT, LIVE

providers.connect({{"traces": None}}, None, {{}})
RECORDER.connect_by(lambda: providers.connect({{"traces": None, "metrics": None, "logs": None}}, None, {{}}))
step = RECORDER.begin("megatron.train_step", LIVE)
RECORDER.end(RECORDER.begin("megatron.microbatch.forward", FREQUENT))
RECORDER.end(step)
RECORDER.flush()
RECORDER.meter.create_counter("steps").add(1)
print(len(exporter.get_finished_spans()), reader.get_metrics_data() is not None)
"""
    )
    assert out == "2 True"
    assert err.count(said) == 1


AT_EXIT = """
import time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from megatron_autoinstrument.export import providers
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import FREQUENT

providers._APPLICATIONS_EXIT_TIMEOUT_S = 1.0
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
RECORDER.connect_by(lambda: providers.connect({"traces": None}, None, {}))
RECORDER.end(RECORDER.begin("megatron.microbatch.forward", FREQUENT))
print(time.time())
"""


def test_the_shutdown_of_the_users_provider_does_not_wait_for_a_collector_that_refuses():
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", AT_EXIT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.time() - float(done.stdout) < 4  # the SDK alone: 7
    assert "1 spans were dropped: 1 were not exported" in done.stderr
    assert done.stderr.count("\n") == 2
