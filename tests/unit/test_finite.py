"""Neither NaN nor infinity leaves the process."""

import logging
import math

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogExporter, SimpleLogRecordProcessor

from megatron_autoinstrument import ab
from megatron_autoinstrument.common.finite import finite, finite_log, is_finite
from megatron_autoinstrument.export import providers, resource
from megatron_autoinstrument.process import ranks
from megatron_autoinstrument.recording.record import FREQUENT, LIVE
from megatron_autoinstrument.targets import logging as logging_target
from megatron_autoinstrument.targets import optimizer

NOT_FINITE = [math.nan, math.inf, -math.inf]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the exporter's older name


class Float(float):
    """As numpy's is."""


@pytest.mark.parametrize("bad", [*NOT_FINITE, Float("nan"), Float("inf")])
def test_what_is_not_finite_is_said_to_be_so_however_deep_it_is(bad):
    assert finite({"loss": bad, "lr": 0.5, "n": 10**400}) == {"loss.finite": False, "lr": 0.5, "n": 10**400}
    assert finite({"losses": [1.0, bad]}) == {"losses.finite": False}
    assert finite({"losses": (1.0, {"a": {bad}})}) == {"losses.finite": False}
    assert finite({"all": {"loss": bad, "lr": 0.5}}) == {"all": {"loss.finite": False, "lr": 0.5}}
    good = {"text": "nan", "none": None, "list": [1, 2.5, "inf"], "more": {"a": (True,)}, "bytes": b"nan"}
    assert finite(good) is good


def test_what_contains_itself_is_looked_at_for_a_while():
    circle = {"a": 1}
    circle["circle"] = circle
    ring = [1.0]
    ring.append(ring)
    assert not is_finite(circle)
    assert finite({"ring": ring, "b": 2}) == {"ring.finite": False, "b": 2}
    assert finite(circle)["a"] == 1


@pytest.mark.parametrize("kind", [LIVE, FREQUENT])
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_no_span_carries_it_whenever_it_became_known(recorder, exporter, kind, bad):
    step = recorder.begin("megatron.train_step", LIVE, {"a": bad})
    call = recorder.begin("call", kind, {"b": bad, "c": 1})
    inner = recorder.begin("inner", FREQUENT)
    recorder.end(inner)
    recorder.drain()  # what is around it starts now
    recorder.end(call, attributes={"d": [bad]})
    recorder.end(recorder.begin("failed", FREQUENT, {"e": bad}), ValueError("bad"))
    recorder.end(step, hold=True)
    recorder.end_held({"megatron.loss": bad})
    recorder.drain()
    got = {span.name: dict(span.attributes) for span in exporter.get_finished_spans()}
    assert got["megatron.train_step"] == {"a.finite": False, "megatron.loss.finite": False}
    assert got["call"] == {"b.finite": False, "c": 1, "d.finite": False}
    assert got["failed"] == {"e.finite": False, "error.type": "ValueError"}


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_the_optimizers_span_says_so_of_the_gradient_norm(recorder, exporter, monkeypatch, bad):
    hook = optimizer.SEAMS[0].hook(lambda: None, recorder)
    hook.end(hook.begin((), {}), (True, bad, None), None)
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes) == {"megatron.update_successful": True, "megatron.grad_norm.finite": False}


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_no_resource_carries_it(fake_module, bad):
    arguments = type("Args", (), {"train_iters": bad, "num_layers": 2})
    fake_module("megatron.training.global_vars")._GLOBAL_ARGS = arguments
    found = resource.attributes(ranks.Rank(0, 1, 0), "run")
    assert found["megatron.num_layers"] == 2
    assert "megatron.train_iters" not in found


def test_blocks_of_no_length_are_compared_with_nothing():
    pairs = [(0.0, 1.0), (0.0, 0.0)] + [(1.0, 1.0)] * 8
    found = ab.overhead(pairs)
    assert (found.percent, found.low, found.high, found.pairs) == (0.0, 0.0, 0.0, 8)
    assert ab.overhead([(0.0, 1.0)] * 8) is None


@pytest.fixture
def exported(monkeypatch, recorder):
    """Logs a record through the hook, and gives what was exported of it."""
    exporter, provider = InMemoryLogExporter(), LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    connection = providers.connect({"logs": provider}, None, {})
    monkeypatch.setattr(type(recorder), "log_handler", property(lambda self: connection.log_handler))
    hook = logging_target._call_handlers(logging.Logger.callHandlers, recorder)

    def export(record):
        hook.begin((logging.getLogger(record.name), record), {})
        (log,) = exporter.get_finished_logs()
        return log.log_record

    return export


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_no_log_record_carries_it_and_other_handlers_get_it_as_it_was(exported, bad):
    record = logging.LogRecord("user", logging.INFO, __file__, 1, "loss is %s", (bad,), None)
    record.loss, record.lr, record.all = bad, 0.5, {"a": [1.0, bad], "b": 1}
    before = dict(vars(record))
    log = exported(record)
    assert log.body == f"loss is {bad}"
    sent = {key: value for key, value in log.attributes.items() if not key.startswith("code.")}
    assert {key: dict(value) if key == "all" else value for key, value in sent.items()} == {
        "loss.finite": False,
        "lr": 0.5,
        "all": {"a.finite": False, "b": 1},
    }
    assert vars(record) == before


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("wrap", [lambda bad: bad, lambda bad: {"loss": bad}, lambda bad: [bad]])
def test_a_message_that_is_no_text_is_sent_as_it_is_printed(exported, bad, wrap):
    record = logging.makeLogRecord({"name": "user", "msg": wrap(bad), "levelno": logging.INFO})
    assert exported(record).body == record.getMessage()


def test_a_record_that_is_finite_is_the_same_object():
    record = logging.makeLogRecord({"msg": {"loss": 1.5}, "lr": 0.5})
    assert finite_log(record) is record
