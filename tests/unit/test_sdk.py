import random
import subprocess
import sys

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator

from megatron_autoinstrument import ids, resource, sdk
from megatron_autoinstrument.ranks import Rank

OURS = resource.attributes(Rank(3, 8, 1), "run7")


def fresh_process(code, **environment):
    """What `code` prints in a process of its own: the global provider can be set only once in each."""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


CONNECT = """
from megatron_autoinstrument import sdk
connection = sdk.connect({{"traces": None}}, {exporter!r}, {{"service.name": "megatron-lm", "dl.rank": 3}})
provider = connection._providers["traces"]
"""


def test_spans_leave_pythons_random_state_alone(provider):
    before = random.getstate()
    connection = sdk.connect({"traces": provider}, None, {})
    for _ in range(1000):
        connection.tracer.start_span("megatron.train_step").end()
    assert random.getstate() == before


def test_ranks_seeded_alike_draw_different_ids():
    generator = ids.PrivateIdGenerator()
    drawn = set()
    for _ in range(2):
        random.seed(1234)
        drawn |= {generator.generate_span_id(), generator.generate_trace_id()}
    assert len(drawn) == 4


def test_an_id_generator_that_someone_chose_stays():
    class Chosen(IdGenerator):
        def generate_span_id(self):
            return 1

        def generate_trace_id(self):
            return 2

    connection = sdk.connect({"traces": TracerProvider(id_generator=Chosen())}, None, {})
    assert connection.tracer.start_span("x").get_span_context().span_id == 1


def test_a_provider_made_earlier_is_completed_in_place_and_keeps_what_was_chosen(exporter):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=Resource.create({"deployment.environment": "test", "nemo.run.id": "mine"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sdk.connect({"traces": provider}, None, OURS).tracer.start_span("x").end()
    (span,) = exporter.get_finished_spans()
    attributes = span.resource.attributes
    assert attributes["dl.rank"] == 3
    assert attributes["service.name"] == "megatron-lm"
    assert attributes["service.instance.id"] == "run7-rank3"
    assert attributes["deployment.environment"] == "test"
    assert attributes["nemo.run.id"] == "mine"


def test_what_the_environment_names_wins(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llama")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=0f0c8bd3-9c3d-4c44-8a55-0d1c0a4f6a51,team=x")
    described = sdk._described(Resource.create(), sdk._New(None, OURS, None, None)).attributes
    assert described["service.name"] == "llama"
    assert described["service.instance.id"] == "0f0c8bd3-9c3d-4c44-8a55-0d1c0a4f6a51"
    assert described["team"] == "x"
    assert described["dl.world_size"] == 8


def test_the_applications_global_provider_is_used_and_never_replaced():
    out, err = fresh_process(
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "theirs = TracerProvider(); trace.set_tracer_provider(theirs)\n"
        + CONNECT.format(exporter=None)
        + "print(provider is theirs is trace.get_tracer_provider(), bool(sdk._ours), connection.exit_timeout_s)"
    )
    assert out == "True False 10.0"
    assert not err


def test_without_a_provider_ours_exports_otlp_over_grpc_and_is_global():
    out, err = fresh_process(
        "from opentelemetry import trace\n"
        + CONNECT.format(exporter=None)
        + "processor = provider._active_span_processor._span_processors[0]\n"
        "print(trace.get_tracer_provider() is provider, bool(sdk._ours), connection.exit_timeout_s)\n"
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
    # Nobody listens: the stock SDK's own shutdown alone waits longer than this.
    out, _ = fresh_process(
        "import atexit, time\n"
        "atexit.register(lambda: print(time.monotonic() - start < 1))\n"
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
from megatron_autoinstrument import sdk

class Exporter(ConsoleMetricExporter):
    def export(self, *args, **kwargs):
        os.write(1, f"exported by {os.getpid()}\\n".encode())
        return super().export(*args, **kwargs)

if os.environ["WHOSE"] == "theirs":
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(Exporter(), export_interval_millis=50)]))
else:
    sdk._component = lambda kind, name: Exporter
connection = sdk.connect({"metrics": None}, "console", {})
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


def test_a_service_name_from_a_flag_wins(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llama")
    described = sdk._described(Resource.create(), sdk._New(None, OURS, "flagged", None))
    assert described.attributes["service.name"] == "flagged"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin_v1"}, "zipkin_v1"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier/pigeon"}, "carrier/pigeon"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "abc"}, "abc"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "10"}, ""),
    ],
)
def test_what_cannot_be_built_leaves_no_half_built_provider_behind(environment, named):
    out, err = fresh_process(
        "from opentelemetry import trace\nfrom megatron_autoinstrument import sdk\n"
        "connection = sdk.connect({'traces': None}, None, {})\nconnection.tracer.start_span('x').end()\n"
        "print(type(trace.get_tracer_provider()).__name__)",
        **environment,
    )
    assert out == "ProxyTracerProvider"
    assert "No traces are recorded: OpenTelemetry could not be set up for them." in err
    assert named in err


def test_a_collector_that_refuses_leaves_pythons_random_state_alone():
    out, _ = fresh_process(
        "import random, time\n" + CONNECT.format(exporter="otlp") + "before = random.getstate()\n"
        "connection.tracer.start_span('x').end()\n"
        "import threading; threading.Thread(target=connection.flush_spans, daemon=True).start(); time.sleep(2.5)\n"
        "print(random.getstate() == before)\nimport os, sys; sys.stdout.flush(); os._exit(0)",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
    )
    assert out == "True"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NEMO_LENS_RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "mine"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "abc"}, "7"),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "abc"),
    ],
)
def test_the_run_id_is_what_the_scheduler_calls_the_run(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ids.run_id() == expected


def test_without_a_scheduler_the_run_id_comes_from_the_start_time_that_all_ranks_share(monkeypatch, fake_module):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    training = fake_module("megatron.training.training")
    training._TRAIN_START_TIME = 1.0
    older = ids.run_id()
    training._LEGACY_TRAIN_START_TIME = 2.0  # from core 0.18 on this is the one that is reduced
    assert ids.run_id() != older
    assert ids.run_id() == ids.run_id()
    assert len(older) == 12
