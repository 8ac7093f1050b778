"""Child processes of a rank record nothing; and what the environment may hold against us harms nothing."""

import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from harness import EVERYTHING, INSTRUMENT, MEGATRON, PLAIN, PTH, SCRIPTS, SWEEP, plain_losses, train
from opentelemetry_variables import variables
from test_spans_of_a_run import Scenario, expected

from megatron_autoinstrument.settings.table import SETTINGS

ALL_SIGNALS = {
    **EVERYTHING,
    "MEGATRON_OTEL_LOGS_ENABLED": "1",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "otlp",
    "OTEL_METRIC_EXPORT_INTERVAL": "50",
}


@pytest.mark.parametrize("start", ["fork", "spawn", *(["forkserver"] if SWEEP else [])])
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
MISLED = [name for name in SETTINGS if name.startswith("MEGATRON_OTEL_")]


def test_nonsense_in_every_variable_is_named_once_and_changes_nothing():
    wrong = dict.fromkeys(MISLED, NONSENSE)
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


# Each of them alone, on a Megatron without tensors: tests/processes/test_opentelemetry_settings.py.
HOSTILE = "%s%n\x01\x1b[31m" + "x,=;" * 3000


@pytest.mark.parametrize("value", ["", HOSTILE, *([NONSENSE, "-1"] if SWEEP else [])])
def test_whatever_all_variables_of_opentelemetrys_hold_training_is_the_same(value):
    known = variables()
    assert len(known) > 60
    wrong = dict.fromkeys(known, value)
    if not value:  # these two would have the API itself fail, whoever imports it; the receiver is at the third
        for name in ("OTEL_PROPAGATORS", "OTEL_PYTHON_CONTEXT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
            del wrong[name]
    run = train(ranks=1, way=PTH, environment={**ALL_SIGNALS, **wrong})
    assert run.status == 0, run.output[-3000:]
    assert run.losses == plain_losses(ranks=1)
    assert run.counts(0)["megatron.train_step"] == (0 if value else 6)
    assert len(re.findall(r"can't be imported|could not be set up|No (?:traces|metrics|logs) are", run.output)) <= 3


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


# Says of each file that is opened for writing, and each folder that is made, by whose code.
TELLING_WRITES = """
import os, sys
STANDARD = ("<frozen", *(os.path.join(os.path.dirname(os.__file__), name) for name in ("os", "tempfile", "pathlib")))
def tell(event, arguments):
    if event in ("os.mkdir", "os.rename", "os.symlink") or (
        event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(STANDARD):
            frame = frame.f_back
        os.write(1, f"\\nWRITES {frame.f_code.co_filename} {arguments[0]}\\n".encode())
sys.addaudithook(tell)
open(os.devnull, "w").close()
"""


def test_without_a_home_and_in_a_folder_that_cannot_be_written_training_is_recorded_and_nothing_written(tmp_path):
    """In /proc nobody makes a file, not even root."""
    with pytest.raises(OSError, match="/proc"):
        Path("/proc/x").touch()
    (tmp_path / "sitecustomize.py").write_text(TELLING_WRITES)
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), "/proc/x")
    environment = {**ALL_SIGNALS, **nowhere, "PYTHONDONTWRITEBYTECODE": "1"}
    run = train(ranks=1, way=PTH, folder="/proc", first=tmp_path, environment=environment)
    assert run.status == 0, run.output[-3000:]
    assert run.counts(0)["megatron.train_step"] == 6
    assert run.losses == plain_losses(ranks=1)
    writes = re.findall(r"^WRITES (.*)", run.output, re.MULTILINE)
    assert f"{tmp_path}/sitecustomize.py {os.devnull}" in writes
    written = [line for line in writes if re.search("/(megatron_autoinstrument|opentelemetry|grpc)/", line)]
    assert len(written) == 1
    assert re.search("/dev/shm/megatron-autoinstrument-[0-9-]+.journal$", written[0])
    assert not [line for line in run.ours() if not line.startswith("WRITES ")]


def test_megatron_without_package_metadata_is_recorded(tmp_path):
    """A checkout on PYTHONPATH is a plain folder; this environment has the same packages but for Megatron."""
    venv.create(tmp_path / "environment", symlinks=True)
    here, python = Path(sysconfig.get_path("purelib")), tmp_path / "environment" / "bin" / "python"
    (there,) = tmp_path.glob("environment/lib/python*/site-packages")
    for entry in here.iterdir():
        if entry.name != "megatron" and not entry.name.startswith("megatron_core"):
            (there / entry.name).symlink_to(entry)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "megatron").symlink_to((MEGATRON or here) / "megatron")
    look = "import importlib.metadata as m, megatron.core; print(megatron.core.__file__); m.version('megatron-core')"
    looked = subprocess.run([python, "-c", look], env={"PYTHONPATH": str(checkout)}, capture_output=True, text=True)
    assert looked.stdout.startswith(str(checkout))
    assert "PackageNotFoundError" in looked.stderr
    run = train(ranks=1, way=INSTRUMENT, python=python, first=checkout, megatron=None)
    assert run.status == 0, run.output[-3000:]
    assert run.counts(0)["megatron.train_step"] == 6
    assert run.losses == plain_losses(ranks=1)
