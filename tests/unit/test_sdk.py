import random

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator

from megatron_autoinstrument.export import ids, providers, resource
from megatron_autoinstrument.process.ranks import Rank

OURS = resource.attributes(Rank(3, 8, 1), "run7")


def test_spans_leave_pythons_random_state_alone(provider):
    before = random.getstate()
    connection = providers.connect({"traces": provider}, None, {})
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

    connection = providers.connect({"traces": TracerProvider(id_generator=Chosen())}, None, {})
    assert connection.tracer.start_span("x").get_span_context().span_id == 1


def test_a_provider_made_earlier_is_completed_in_place_and_keeps_what_was_chosen(exporter):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=Resource.create({"deployment.environment": "test", "nemo.run.id": "mine"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    providers.connect({"traces": provider}, None, OURS).tracer.start_span("x").end()
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
    described = providers._described(Resource.create(), providers.ProviderOptions(None, OURS, None, None)).attributes
    assert described["service.name"] == "llama"
    assert described["service.instance.id"] == "0f0c8bd3-9c3d-4c44-8a55-0d1c0a4f6a51"
    assert described["team"] == "x"
    assert described["dl.world_size"] == 8


def test_a_service_name_from_a_flag_wins(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llama")
    described = providers._described(Resource.create(), providers.ProviderOptions(None, OURS, "flagged", None))
    assert described.attributes["service.name"] == "flagged"


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
    assert ids.run_id(0) == expected
