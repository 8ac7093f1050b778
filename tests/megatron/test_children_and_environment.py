"""Child processes of a rank record nothing; and what the environment may hold against us harms nothing."""

import os
import re

import pytest
from harness import EVERYTHING, INSTRUMENT, PLAIN, PTH, SCRIPTS, plain_losses, train
from test_spans_of_a_run import Scenario, expected

from megatron_autoinstrument import environment_variables

ALL_SIGNALS = {
    **EVERYTHING,
    "MEGATRON_OTEL_LOGS_ENABLED": "1",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "otlp",
    "OTEL_METRIC_EXPORT_INTERVAL": "50",
}


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_data_workers_started_inside_a_step_record_and_export_nothing(start):
    """Forked ones are Megatron's own, started while a span is open and the exporters' threads are at work."""
    run = train(
        *(("--num-workers", "2") if start == "fork" else ()),
        ranks=1,
        script=SCRIPTS / "with_workers.py",
        environment={**ALL_SIGNALS, "START": start},
    )
    assert run.status == 0, run.output[-3000:]
    workers = re.findall(r"WORKER (\d+) recording=(\w+)", run.output)
    assert len(workers) >= (4 if start == "fork" else 1)
    assert {recording for _, recording in workers} == {"False"}
    counts = run.counts(0)
    assert counts.pop("megatron.grad_sync.start") >= 6
    assert counts == expected(Scenario((), ranks=1), stage=0)
    for records in (run.spans, run.points, run.logs):
        assert len({record.resource["process.pid"] for record in records}) == 1
    # A child that repeated its parent's metrics would go on exporting a number of steps that has been passed.
    counted = [point.count for point in run.points if point.name == "megatron.training.step_duration_ms"]
    assert counted == sorted(counted)
    if start == "fork":  # the script's own loader draws from torch's random state
        plain = train(
            *("--num-workers", "2"),
            ranks=1,
            way=PLAIN,
            script=SCRIPTS / "with_workers.py",
            environment={"MEGATRON_OTEL_ENABLED": "0", "START": start},
        )
        assert run.losses == plain.losses


NONSENSE = "no such thing"
MISLED = [name for name in vars(environment_variables) if name.startswith("MEGATRON_OTEL_")]


def test_nonsense_in_every_variable_is_named_once_and_changes_nothing():
    wrong = {name: NONSENSE for name in MISLED if name != "MEGATRON_OTEL_EXPORT_STRATEGY"}
    run = train(ranks=1, environment={**wrong, "NEMO_LENS_RUN_ID": "/\n\t", "NEMO_LENS_USER_ID": ""})
    assert run.status == 0, run.output[-3000:]
    for name in wrong:
        assert run.output.count(f"{name}={NONSENSE!r} is ignored. Allowed: ") == 1, name
    assert run.counts(0) == {  # the default
        "megatron.pretrain": 1,
        "megatron.train": 1,
        "megatron.evaluate": 4,
        "megatron.evaluate.step": 8,
    }
    assert run.losses == plain_losses(ranks=1)


def test_turned_off_by_opentelemetrys_own_list_nothing_of_megatron_is_recorded():
    run = train(ranks=1, environment={**EVERYTHING, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "megatron"})
    assert run.status == 0, run.output[-3000:]
    assert not [span for span in run.spans if span.name.startswith("megatron.")]
    assert not run.ours()


def test_without_a_distro_under_opentelemetry_instrument_the_providers_are_ours(tmp_path):
    """A distribution that is found first hides the entry points of the installed one."""
    folder = tmp_path / "opentelemetry_distro-99.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: opentelemetry-distro\nVersion: 99\n")
    run = train(ranks=1, way=INSTRUMENT, first=tmp_path, environment=EVERYTHING)
    assert run.status == 0, run.output[-3000:]
    assert run.counts(0)["megatron.train_step"] == 6
    assert "telemetry.auto.version" not in run.spans[0].resource  # what their distro adds
    assert run.losses == plain_losses(ranks=1)


def test_without_a_home_and_in_a_folder_that_cannot_be_written_training_is_recorded(tmp_path):
    nowhere = tmp_path / "nowhere"
    nowhere.write_text("a file, so that nothing can be made in it")
    run = train(
        ranks=1,
        way=PTH,
        environment={
            **EVERYTHING,
            **{name: str(nowhere / "x") for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")},
        },
    )
    assert run.status == 0, run.output[-3000:]
    assert run.counts(0)["megatron.train_step"] == 6
    assert not os.path.isdir(nowhere)
