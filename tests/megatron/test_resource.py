"""The resource of a real run, whichever way in."""

from functools import cache

import pytest
import tomllib
from harness import EVERYTHING, FIXTURES, INSTRUMENT, OLDEST_OTEL, PLAIN, PTH, SCRIPTS, train

CONTRACT = tomllib.loads((FIXTURES / "telemetry.toml").read_text())["resource"]
TELLING = {
    **EVERYTHING,
    "OTEL_METRICS_EXPORTER": "otlp",
    "NEMO_LENS_USER_ID": "me",
    "SLURM_JOB_NAME": "tiny",
    "K8S_NAMESPACE": "team",
}
WAYS = {
    "opentelemetry-instrument": {"way": INSTRUMENT},
    "opentelemetry-instrument, oldest release": {"way": INSTRUMENT, "otel": OLDEST_OTEL},
    "the variable alone": {"way": PTH},
    "instrument() in the script": {"way": PLAIN, "script": SCRIPTS / "instrument_first.py"},
}


@cache
def run_of(name):
    run = train("--pipeline-model-parallel-size", "2", environment=TELLING, **WAYS[name])
    assert run.status == 0, run.output[-3000:]
    return run


@pytest.mark.parametrize("name", WAYS)
def test_every_key_of_the_contract_is_there_on_spans_and_metrics(name):
    run = run_of(name)
    for rank in (0, 1):
        for resource in [span.resource for span in run.of(rank)] + [
            point.resource for point in run.points if point.resource["dl.rank"] == rank
        ]:
            assert set(CONTRACT) <= set(resource)
            assert resource["service.name"] == "megatron-lm"
            assert resource["service.instance.id"] == f"{resource['nemo.run.id']}-rank{rank}"
            assert resource["nemo.user.id"] == "me"
            assert (resource["dl.rank"], resource["dl.world_size"], resource["dl.local_rank"]) == (rank, 2, rank)
            assert (resource["dl.pipeline_parallel.size"], resource["dl.data_parallel.size"]) == (2, 1)
            assert (resource["megatron.num_layers"], resource["megatron.hidden_size"]) == (4, 64)
            assert resource["megatron.precision"] == "fp32"
            assert resource["slurm.job.name"] == "tiny"
            assert resource["k8s.namespace.name"] == "team"
            assert {"host.name", "process.pid", "host.gpu.count"} <= set(resource)
    assert {point.resource["dl.rank"] for point in run.points} == {0, 1}
    assert len({span.resource["nemo.run.id"] for span in run.spans}) == 1
    assert len({span.resource["service.instance.id"] for span in run.spans}) == 2
