import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from megatron_autoinstrument import MegatronInstrumentor, instrumentor, targets

SOURCE = "def train_step(model, iteration=None):\n    return model\n"


@pytest.fixture
def training(fake_module):
    return fake_module("megatron.training.training", SOURCE)


@pytest.fixture
def megatron(monkeypatch):
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "all")
    monkeypatch.setenv("MEGATRON_OTEL_METRICS_ENABLED", "0")
    yield MegatronInstrumentor()
    if MegatronInstrumentor().is_instrumented_by_opentelemetry:
        MegatronInstrumentor().uninstrument()
    instrumentor.RECORDER.abandon()


def spans(exporter):
    instrumentor.RECORDER.release()  # training_log would
    instrumentor.RECORDER.flush()
    return [span.name for span in exporter.get_finished_spans()]


def test_the_entry_point_is_found_under_its_name():
    (entry_point,) = entry_points(group="opentelemetry_instrumentor", name="megatron")
    assert entry_point.load() is MegatronInstrumentor


def test_it_depends_on_no_package_of_megatron(megatron):
    assert not list(megatron.instrumentation_dependencies())


def test_importing_it_imports_neither_torch_nor_megatron_and_takes_under_50_ms():
    code = (
        "import time, sys, opentelemetry.instrumentation.instrumentor, opentelemetry.trace\n"
        "start = time.perf_counter()\n"
        "from megatron_autoinstrument import MegatronInstrumentor\n"
        "print(time.perf_counter() - start)\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'grpc')])\n"
        "print('opentelemetry.sdk.trace' in sys.modules)"
    )
    took = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        seconds, imported, sdk = out.split("\n")[:3]
        assert (imported, sdk) == ("", "False")
        took.append(float(seconds))
    assert min(took) < 0.05


def test_instrument_after_import_twice_and_again_after_uninstrument(megatron, training, provider, exporter):
    original = training.train_step
    megatron.instrument(tracer_provider=provider)
    megatron.instrument(tracer_provider=provider)
    assert training.train_step("model", iteration=4) == "model"
    assert spans(exporter) == ["megatron.train_step"]
    assert exporter.get_finished_spans()[0].attributes["megatron.iteration"] == 5
    megatron.uninstrument()
    assert training.train_step is original
    training.train_step("model")
    assert spans(exporter) == ["megatron.train_step"]
    megatron.instrument(tracer_provider=provider)
    training.train_step("model")
    assert spans(exporter) == ["megatron.train_step"] * 2


def test_instrument_before_import(megatron, monkeypatch, tmp_path, provider, exporter):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "training.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    megatron.instrument(tracer_provider=provider)
    from megatron.training.training import train_step

    train_step("model")
    assert spans(exporter) == ["megatron.train_step"]
    megatron.uninstrument()
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    "environment",
    [
        {"MEGATRON_OTEL_ENABLED": "0"},
        {"NEMO_LENS_ENABLED": "off"},
        {"OTEL_SDK_DISABLED": "true"},
        {"MEGATRON_OTEL_TRACES_ENABLED": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_nothing_is_patched_when_off_and_on_ranks_that_do_not_export(
    megatron, monkeypatch, training, provider, environment
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    original = training.train_step
    megatron.instrument(tracer_provider=provider)
    assert training.train_step is original


def test_a_failed_install_leaves_megatron_as_it_was_and_raises_nothing(
    megatron, monkeypatch, training, provider, caplog
):
    monkeypatch.setattr("megatron_autoinstrument.patching.reraise_internal_errors", False)
    failures = [RuntimeError("broken")]

    def fails_once(new):
        if failures:
            raise failures.pop()

    monkeypatch.setattr(instrumentor.LEDGER, "_rebind", fails_once)
    original = training.train_step
    megatron.instrument(tracer_provider=provider)
    assert training.train_step is original
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_exporter_that_cannot_be_had_costs_one_message_and_no_training(megatron, monkeypatch, training, caplog):
    monkeypatch.setattr("megatron_autoinstrument.patching.reraise_internal_errors", False)
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "no_such_exporter")
    megatron.instrument()
    for _ in range(3):
        assert training.train_step("model") == "model"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no_such_exporter" in record.getMessage()


def test_seams_are_told_apart_and_each_names_groups_that_exist():
    from megatron_autoinstrument.groups import GROUPS, METRICS

    assert len({(seam.module, seam.path) for seam in targets.SEAMS}) == len(targets.SEAMS)
    assert all(seam.groups <= {*GROUPS, METRICS} for seam in targets.SEAMS)
