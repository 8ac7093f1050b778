"""Each way to turn the instrumentation on, as a user would, on real Megatron."""

from functools import cache

import pytest
from harness import EVERYTHING, INSTRUMENT, OLDEST_OTEL, PLAIN, PTH, SCRIPTS, plain_losses, train

PIPELINE = ("--pipeline-model-parallel-size", "2")

# In the shell or pod that starts torchrun, which tells its ranks otherwise.
EXPORTED = {**EVERYTHING, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
# Way, script, and the folder with another OpenTelemetry.
WAYS = {
    "opentelemetry-instrument": {"way": INSTRUMENT, "environment": EXPORTED},
    "opentelemetry-instrument, oldest release": {"way": INSTRUMENT, "otel": OLDEST_OTEL, "environment": EXPORTED},
    "the variable alone": {"way": PTH},
    "the variable alone, oldest release": {"way": PTH, "otel": OLDEST_OTEL},
    "instrument() before Megatron's import": {"way": PLAIN, "script": SCRIPTS / "instrument_first.py"},
    "instrument() after Megatron's import": {"way": PLAIN, "script": SCRIPTS / "instrument_last.py"},
    "two ways at once": {"way": INSTRUMENT, "environment": {**EVERYTHING, "MEGATRON_OTEL_ENABLED": "1"}},
}


@pytest.mark.parametrize("name", WAYS)
def test_each_way_records_the_workers_and_leaves_the_losses_alone(name):
    run = train(*PIPELINE, torchrun=(), **WAYS[name])
    assert run.status == 0, run.output[-3000:]
    assert run.losses == plain_losses(*PIPELINE)
    assert run.ranks == [0, 1]
    for rank in run.ranks:
        counts = run.counts(rank)
        assert counts["megatron.pretrain"] == 1
        assert counts["megatron.train_step"] == 6
        assert counts["megatron.microbatch.forward"] == (6 + 8) * 4
        assert counts["megatron.grad_sync.finish"] == 6
    assert {span.scope for span in run.spans} == {"megatron_autoinstrument"}
    first = run.spans[0].resource
    if "oldest" in name:
        assert first["telemetry.sdk.version"] == "1.33.0"
    assert first["service.name"] == "megatron-lm"
    assert {span.resource["service.instance.id"] for span in run.spans} == {
        f"{first['nemo.run.id']}-rank0",
        f"{first['nemo.run.id']}-rank1",
    }
    assert not run.ours()


@cache
def killed(way):
    run = train(*PIPELINE, torchrun=(), way=way, environment={**EVERYTHING, "MEGATRON_OTEL_ENABLED": "0"})
    assert run.status == 0, run.output[-3000:]
    return run


@pytest.mark.parametrize("way", [INSTRUMENT, PTH])
def test_zero_in_the_variable_is_a_kill_switch(way):
    run = killed(way)
    assert not [span for span in run.spans if span.name.startswith("megatron.")]


@cache
def on_the_console():
    run = train(ranks=1, way=PTH, environment={"MEGATRON_OTEL_EXPORTER": "console"})
    assert run.status == 0, run.output[-3000:]
    return run


def test_console_prints_spans_and_sends_none():
    run = on_the_console()
    assert '"name": "megatron.pretrain"' in run.output
    assert not run.spans
