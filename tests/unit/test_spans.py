import gc
import os
import queue
import threading
import time
import types
from collections import Counter

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from megatron_autoinstrument.export import providers
from megatron_autoinstrument.recording import outbox
from megatron_autoinstrument.recording.hooks import span
from megatron_autoinstrument.recording.record import FREQUENT, LIVE, SILENT
from megatron_autoinstrument.targets import async_utils

GROUPS = frozenset({"step", "microbatch", "checkpoint"})


def finished(recorder, exporter):
    recorder.drain()
    return {span.name: span for span in exporter.get_finished_spans()}


def parent_of(span, among):
    names = {other.context.span_id: name for name, other in among.items()}
    return names.get(span.parent.span_id) if span.parent else None


def test_frequent_records_become_spans_with_the_times_and_the_parent_they_had(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    outer = recorder.begin("outer", FREQUENT, {"a": 1})
    inner = recorder.begin("inner", FREQUENT)
    recorder.end(inner)
    recorder.end(outer, attributes={"b": 2})
    recorder.end(step)
    got = finished(recorder, exporter)
    assert parent_of(got["inner"], got) == "outer"
    assert parent_of(got["outer"], got) == "megatron.train_step"
    assert got["megatron.train_step"].parent is None
    assert dict(got["outer"].attributes) == {"a": 1, "b": 2}
    assert (got["outer"].start_time, got["outer"].end_time) == (outer.start, outer.end)
    assert step.start <= outer.start <= inner.start <= inner.end <= outer.end <= step.end


def test_the_users_spans_nest_under_live_ones_and_live_ones_under_the_users(recorder, exporter, provider):
    tracer = provider.get_tracer("user")
    with tracer.start_as_current_span("job"):
        train = recorder.begin("megatron.train", LIVE)
        with tracer.start_as_current_span("epoch"):
            step = recorder.begin("megatron.train_step", LIVE)
            recorder.end(step)
        recorder.end(train)
    got = finished(recorder, exporter)
    assert parent_of(got["megatron.train_step"], got) == "epoch"
    assert parent_of(got["epoch"], got) == "megatron.train"
    assert parent_of(got["megatron.train"], got) == "job"
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_silent_record_is_no_span_and_its_children_belong_to_its_parent(recorder, exporter):
    train = recorder.begin("megatron.train", LIVE)
    step = recorder.begin("megatron.train_step", SILENT)
    forward = recorder.begin("megatron.microbatch.forward", FREQUENT)
    for record in (forward, step, train):
        recorder.end(record)
    got = finished(recorder, exporter)
    assert set(got) == {"megatron.train", "megatron.microbatch.forward"}
    assert parent_of(got["megatron.microbatch.forward"], got) == "megatron.train"


def test_one_call_gives_one_span_of_a_name(recorder, exporter):
    chained = recorder.begin("megatron.optimizer_step", LIVE)
    assert recorder.begin("megatron.optimizer_step", LIVE) is None
    recorder.end(chained)
    recorder.drain()
    assert len(exporter.get_finished_spans()) == 1


def test_what_autograds_thread_does_belongs_under_what_the_training_thread_does(recorder, exporter):
    backward = recorder.begin("megatron.microbatch.backward", FREQUENT)

    def hook():
        record = recorder.begin("megatron.grad_sync.start", FREQUENT)
        recorder.end(record)

    thread = threading.Thread(target=hook)
    thread.start()
    thread.join()
    assert recorder.current is backward
    recorder.end(backward)
    got = finished(recorder, exporter)
    assert parent_of(got["megatron.grad_sync.start"], got) == "megatron.microbatch.backward"


def test_a_record_that_a_fault_left_open_on_another_thread_adopts_nothing_later(recorder, exporter):
    backward = recorder.begin("megatron.microbatch.backward", FREQUENT)

    def recompute():
        outer = recorder.begin("outer", FREQUENT)
        recorder.begin("lost", FREQUENT)
        recorder.end(outer)
        recorder.end(recorder.begin("later", FREQUENT))

    thread = threading.Thread(target=recompute)
    thread.start()
    thread.join()
    recorder.end(backward)
    got = finished(recorder, exporter)
    assert parent_of(got["outer"], got) == parent_of(got["later"], got) == "megatron.microbatch.backward"
    assert "lost" not in got


def test_a_combined_call_gives_one_span_per_direction_with_the_same_times(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    both = recorder.begin_together(["megatron.p2p.send_forward", "megatron.p2p.recv_backward"], {})
    recorder.end_together(both, None)
    recorder.end(step)
    got = finished(recorder, exporter)
    sent, received = got["megatron.p2p.send_forward"], got["megatron.p2p.recv_backward"]
    assert (sent.start_time, sent.end_time) == (received.start_time, received.end_time)
    assert sent.parent.span_id == received.parent.span_id == got["megatron.train_step"].context.span_id


def test_what_a_combined_call_raises_is_recorded_once(recorder, exporter):
    both = recorder.begin_together(["megatron.p2p.send_forward", "megatron.p2p.recv_backward"], {})
    recorder.end_together(both, RuntimeError("connection closed"))
    got = finished(recorder, exporter)
    assert [span.attributes["error.type"] for span in got.values()] == ["RuntimeError"] * 2
    assert {name: len(span.events) for name, span in got.items()} == {
        "megatron.p2p.send_forward": 1,
        "megatron.p2p.recv_backward": 0,
    }


def test_what_a_signal_cuts_off_is_marked_on_every_thread_and_what_was_over_is_not(recorder, exporter, capfd):
    train = recorder.begin("megatron.train", LIVE)
    recorder.end(recorder.begin("over", FREQUENT))
    opened, leave = threading.Event(), threading.Event()

    def recompute():
        recorder.begin("megatron.layer.forward", FREQUENT)
        recorder.begin("megatron.layer.mlp", FREQUENT)
        opened.set()
        leave.wait()

    thread = threading.Thread(target=recompute)
    thread.start()
    opened.wait()
    recorder.terminate("SIGTERM", lambda: False)
    leave.set()
    thread.join()
    errors = {span.name: span.attributes.get("error.type") for span in exporter.get_finished_spans()}
    cut = ("megatron.train", "megatron.layer.forward", "megatron.layer.mlp")
    assert errors == {"over": None, **dict.fromkeys(cut, "SIGTERM")}
    assert train.end
    assert not capfd.readouterr().err


def test_a_deferred_span_opens_with_the_next_one_and_starts_when_it_was_called(recorder, exporter):
    connected = []
    connect, recorder._connect = recorder._connect, lambda: connected.append(1) or connect()
    run = recorder.begin_deferred("megatron.pretrain")
    time.sleep(0.01)
    assert not connected
    init = recorder.begin("megatron.model_init", LIVE)
    assert connected
    recorder.end(init)
    recorder.end(run)
    got = finished(recorder, exporter)
    assert parent_of(got["megatron.model_init"], got) == "megatron.pretrain"
    assert got["megatron.model_init"].start_time - got["megatron.pretrain"].start_time >= 10_000_000


def test_a_deferred_span_whose_group_turns_out_to_be_off_is_none(recorder, exporter):
    run = recorder.begin_deferred("megatron.pretrain")
    recorder.set_groups(frozenset({"step"}))
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(step)
    recorder.end(run)
    assert set(finished(recorder, exporter)) == {"megatron.train_step"}


def test_a_deferred_span_is_recorded_also_when_nothing_follows(recorder, exporter):
    run = recorder.begin_deferred("megatron.pretrain")
    recorder.end(run, RuntimeError("no data"))
    (pretrain,) = finished(recorder, exporter).values()
    assert pretrain.start_time == run.start
    assert pretrain.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("kind", [LIVE, FREQUENT])
def test_an_exception_is_recorded_once_where_it_was_raised_and_marks_the_spans_around(recorder, exporter, kind):
    def call(names, depth=0):
        record = recorder.begin(names[0], LIVE if len(names) > 1 else kind)
        try:
            if len(names) > 1:
                call(names[1:], depth + 1)
            else:
                raise ValueError("bad")
        except ValueError as error:
            recorder.end(record, error)
            raise

    for _ in range(2):  # the second time anew, although the error may have the same id
        exporter.clear()
        with pytest.raises(ValueError, match="bad"):
            call(["megatron.train", "megatron.train_step", "inner"])
        got = finished(recorder, exporter)
        assert len(got) == 3
        assert all(span.status.status_code is StatusCode.ERROR for span in got.values())
        assert all(span.attributes["error.type"] == "ValueError" for span in got.values())
        assert {name: len(span.events) for name, span in got.items()} == {
            "megatron.train": 0,
            "megatron.train_step": 0,
            "inner": 1,
        }
        (event,) = got["inner"].events
        assert "exception.message" not in event.attributes
        assert event.attributes["exception.stacktrace"].endswith("ValueError")
        assert "bad" not in event.attributes["exception.stacktrace"]


@pytest.mark.parametrize(("code", "status"), [(0, "UNSET"), (None, "UNSET"), (1, "ERROR")])
def test_leaving_by_sys_exit_is_an_error_only_with_an_error_code(recorder, exporter, code, status):
    train = recorder.begin("megatron.train", LIVE)
    recorder.end(train, SystemExit(code))
    (span,) = finished(recorder, exporter).values()
    assert span.status.status_code.name == status


def test_work_in_the_background_outlives_the_call_and_links_to_it(recorder, exporter):
    train = recorder.begin("megatron.train", LIVE)
    save = recorder.begin("megatron.save_checkpoint", LIVE)
    write = recorder.begin_background("megatron.save_checkpoint.async_write", save.parent, {"a": 1}, save)
    recorder.end(save)
    recorder.drain()
    assert len(exporter.get_finished_spans()) == 1
    recorder.end_background(write)
    recorder.end_background(write)  # twice is once
    recorder.end(train)
    got = finished(recorder, exporter)
    written = got["megatron.save_checkpoint.async_write"]
    assert parent_of(written, got) == "megatron.train"
    assert [link.context.span_id for link in written.links] == [got["megatron.save_checkpoint"].context.span_id]
    assert len(exporter.get_finished_spans()) == 3


def test_what_runs_at_exit_is_closed_from_the_inside_out(recorder, exporter):
    recorder.begin("megatron.train", LIVE)
    save = recorder.begin("megatron.save_checkpoint", LIVE)
    recorder.begin_background("megatron.save_checkpoint.async_write", save.parent, {}, save)
    recorder.exit()
    got = finished(recorder, exporter)
    assert set(got) == {"megatron.train", "megatron.save_checkpoint", "megatron.save_checkpoint.async_write"}
    assert got["megatron.save_checkpoint.async_write"].attributes["megatron.checkpoint.finalized"] is False
    assert got["megatron.save_checkpoint"].end_time <= got["megatron.train"].end_time


def test_the_thread_hands_records_on_by_itself(recorder, exporter):
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    deadline = time.monotonic() + 60
    while not exporter.get_finished_spans() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(exporter.get_finished_spans()) == 1


def test_records_beyond_the_bound_are_dropped_counted_and_reported(recorder, exporter, monkeypatch, caplog):
    monkeypatch.setattr(outbox, "MAX_WAITING", 2)
    step = recorder.begin("megatron.train_step", LIVE)
    with recorder._draining:
        for _ in range(5):
            recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.end(step)
    assert recorder.flush()
    assert len(exporter.get_finished_spans()) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "3 spans were dropped: 3 did not reach the exporter, since more than 2 waited, or they could not be closed or "
        "handed on, or OpenTelemetry had been shut down before."
    ]


def test_a_record_that_a_fault_left_open_does_not_hold_up_the_others(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.begin("lost", FREQUENT)
    recorder.end(step)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    assert set(finished(recorder, exporter)) == {"megatron.train_step", "megatron.microbatch.forward"}
    assert recorder.dropped == 1


class Elsewhere:
    """A thread of the user's that does one thing after the other."""

    def __init__(self):
        self.work, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (what := self.work.get()) is not None:
            self.done.put(what())

    def __call__(self, what):
        self.work.put(what)
        return self.done.get(timeout=10)


@pytest.fixture
def elsewhere():
    thread = Elsewhere()
    yield thread
    thread.work.put(None)


@pytest.mark.parametrize("around", ["the loop", "a step that ends"])
def test_a_call_that_takes_long_on_another_thread_holds_up_neither_the_others_nor_what_is_inside_it(
    recorder, exporter, monkeypatch, elsewhere, around
):
    monkeypatch.setattr(outbox, "MAX_WAITING", 4)
    train = recorder.begin("megatron.train", LIVE)
    step = recorder.begin("megatron.train_step", LIVE) if around == "a step that ends" else None
    long = elsewhere(lambda: recorder.begin("megatron.layer.forward", FREQUENT, {"a": 1}))
    if step is not None:
        recorder.end(step)
    for _ in range(10):
        elsewhere(lambda: recorder.end(recorder.begin("megatron.layer.mlp", FREQUENT)))
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
        recorder.drain()
    names = Counter(span.name for span in exporter.get_finished_spans())
    assert names["megatron.layer.mlp"] == names["megatron.microbatch.forward"] == 10
    elsewhere(lambda: recorder.end(long, attributes={"b": 2}))
    recorder.end(train)
    got = finished(recorder, exporter)
    assert parent_of(got["megatron.layer.mlp"], got) == "megatron.layer.forward"
    assert parent_of(got["megatron.layer.forward"], got) == ("megatron.train" if step is None else step.name)
    assert dict(got["megatron.layer.forward"].attributes) == {"a": 1, "b": 2}
    assert (got["megatron.layer.forward"].start_time, got["megatron.layer.forward"].end_time) == (long.start, long.end)
    assert len(exporter.get_finished_spans()) == 22 + (step is not None)
    assert recorder.dropped == 0


@pytest.mark.parametrize("generator", ["ours", "the application's"])
def test_what_is_inside_of_a_call_that_is_still_running_names_it_whoever_makes_the_ids(
    recorder, exporter, elsewhere, generator
):
    provider = TracerProvider(id_generator=RandomIdGenerator() if generator != "ours" else None)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    calls = [recorder.begin(f"call {depth}", SILENT if depth == 1 else FREQUENT) for depth in range(4)]
    recorder.end(calls[3], ValueError("bad"))
    recorder.drain()
    assert [span.name for span in exporter.get_finished_spans()] == ["call 3"]
    for call in reversed(calls[:3]):
        recorder.end(call)
    got = finished(recorder, exporter)
    assert [parent_of(got[f"call {depth}"], got) for depth in (3, 2, 0)] == ["call 2", "call 0", None]


def test_a_call_that_never_ends_on_another_thread_is_one_lost_span_at_the_end(recorder, exporter, elsewhere, caplog):
    train = recorder.begin("megatron.train", LIVE)
    lost = elsewhere(lambda: recorder.begin("megatron.layer.forward", FREQUENT))
    recorder.end(train)
    recorder._elsewhere.clear()  # a fault of ours
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.exit()
    assert {span.name for span in exporter.get_finished_spans()} == {"megatron.train", "megatron.microbatch.forward"}
    assert lost.end is None
    assert "1 spans were dropped" in caplog.text


def test_what_runs_on_another_thread_at_the_end_of_the_process_ends_there_also_if_its_step_is_over(
    recorder, exporter, elsewhere
):
    step = recorder.begin("megatron.train_step", LIVE)
    elsewhere(lambda: recorder.begin("megatron.layer.forward", FREQUENT))
    recorder.end(step)
    recorder.exit()
    assert {span.name for span in exporter.get_finished_spans()} == {"megatron.train_step", "megatron.layer.forward"}
    assert recorder.dropped == 0


def test_open_calls_that_nobody_ends_are_bounded(recorder, exporter, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_WAITING", 4)
    for _ in range(10):
        recorder.begin("megatron.layer.forward", FREQUENT)
        recorder.current = None  # a fault of ours
        recorder.drain()
    assert len(recorder._unfinished) + len(recorder._waiting) <= 8
    recorder.exit()
    assert recorder.dropped == 10


@pytest.mark.parametrize("kind", [FREQUENT, LIVE, SILENT])
def test_a_call_on_another_thread_is_recorded_as_its_group_says(recorder, exporter, elsewhere, kind):
    train = recorder.begin("megatron.train", LIVE)
    call = elsewhere(lambda: recorder.begin("megatron.optimizer_step", kind))
    assert elsewhere(lambda: recorder.begin("megatron.optimizer_step", kind)) is None  # the same call
    elsewhere(lambda: recorder.end(recorder.begin("megatron.grad_sync.start", FREQUENT)))
    elsewhere(lambda: recorder.end(call))
    recorder.end(train)
    got = finished(recorder, exporter)
    assert ("megatron.optimizer_step" in got) == (kind is not SILENT)
    around = "megatron.train" if kind is SILENT else "megatron.optimizer_step"
    assert parent_of(got["megatron.grad_sync.start"], got) == around


def test_an_exporter_that_never_answers_bounds_the_exit(recorder, monkeypatch, caplog):
    monkeypatch.setattr("megatron_autoinstrument.export.providers._APPLICATIONS_EXIT_TIMEOUT_S", 0.2)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    go_on, answered = threading.Event(), []
    monkeypatch.setattr(recorder._connection, "flush_spans", lambda final: (go_on.wait(60), answered.append(True)))
    recorder.exit()
    assert not answered
    go_on.set()
    assert "Exporting spans took too long. What was not exported after 0.2 s was given up" in caplog.text


def test_no_step_leaves_a_reference_cycle(recorder, exporter):
    def steps(count):
        for _ in range(count):
            step = recorder.begin("megatron.train_step", LIVE, {"megatron.iteration": 1})
            for _ in range(4):
                recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT, {"a": 1}))
            recorder.end(step)
        recorder.drain()
        exporter.clear()

    steps(10)
    gc.collect()
    gc.disable()
    try:
        steps(100)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_hook_reads_attributes_from_the_call_and_the_result(recorder, exporter):
    def train_step(model, iteration=None):
        pass

    hook = span(
        "megatron.train_step", live=True, given={"megatron.iteration": "iteration"}, returned=lambda r: {"ok": r}
    )(train_step, recorder)
    hook.end(hook.begin(("model", 7), {}), True, None)
    hook.end(hook.begin(("model",), {}), True, None)
    recorder.drain()
    first, second = exporter.get_finished_spans()
    assert dict(first.attributes) == {"megatron.iteration": 7, "ok": True}
    assert dict(second.attributes) == {"ok": True}


def test_a_hook_within_another_span_records_nothing_elsewhere(recorder, exporter):
    hook = span("megatron.save_checkpoint.state_dict", within="megatron.save_checkpoint")(lambda: None, recorder)
    assert hook.begin((), {}) is None
    save = recorder.begin("megatron.save_checkpoint", LIVE)
    assert hook.begin((), {}) is not None
    recorder.end(save)


def test_our_thread_waits_for_the_exporter_every_512_spans_however_they_are_spread(recorder, monkeypatch):
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.drain()
    flushes = []
    monkeypatch.setattr(recorder._connection, "flush_spans", lambda: flushes.append(1))
    for _ in range(1024):
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
        recorder.drain()
    assert len(flushes) == 2


def test_a_span_that_somebodys_processor_refuses_is_counted_and_the_others_are_exported(
    recorder, provider, exporter, caplog
):
    class Refuses(SpanProcessor):
        def on_end(self, span):
            if span.attributes.get("bad"):
                raise ValueError

    provider.add_span_processor(Refuses())
    for number in range(10):
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT, {"bad": number == 3}))
    assert recorder.flush()
    assert len(exporter.get_finished_spans()) == 10  # the exporter's processor came first
    assert "1 spans were dropped" in caplog.text


def test_a_flush_that_fails_says_so(recorder, monkeypatch, caplog):
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    monkeypatch.setattr(recorder._connection, "flush_spans", lambda final: 1 / 0)
    assert not recorder.flush()
    assert "Exporting spans failed" in caplog.text


def test_a_record_left_open_without_a_parent_is_given_up_at_exit_and_counted(recorder, exporter, caplog):
    lost = recorder.begin("megatron.grad_sync.finish", FREQUENT)
    recorder.current = None  # its end failed
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    assert recorder.flush()
    assert [span.name for span in exporter.get_finished_spans()] == ["megatron.microbatch.forward"]
    recorder.exit()
    assert len(exporter.get_finished_spans()) == 1
    assert "1 spans were dropped" in caplog.text
    assert lost.end is None


def test_who_turns_out_to_record_nothing_connects_to_nothing(recorder):
    recorder.connect_by(lambda: 1 / 0, confirm=lambda: recorder.connect_by(None))
    run = recorder.begin_deferred("megatron.pretrain")
    recorder.connect()
    assert recorder.begin("megatron.train_step", LIVE) is None
    recorder.set_groups(frozenset())
    recorder.end(run)
    assert (recorder.current, recorder._thread, recorder.dropped) == (None, None, 0)


def test_a_forked_child_that_returns_through_an_open_call_exports_nothing(recorder, exporter):
    train = recorder.begin("megatron.train", LIVE)
    child = os.fork()
    if child == 0:
        recorder.reset_after_fork()
        recorder.end(train)
        recorder.exit()
        os._exit(len(exporter.get_finished_spans()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder.end(train)
    assert len(exporter.get_finished_spans()) == 1


def test_the_end_of_an_asynchronous_save_that_cannot_be_recorded_does_not_reach_megatron(recorder, monkeypatch, caplog):
    functions = []
    request = types.SimpleNamespace(add_finalize_fn=functions.append)
    hook = async_utils.SEAMS[0].hook(lambda async_request: None, recorder)
    save = recorder.begin("megatron.save_checkpoint", LIVE)
    hook.begin((request,), {})
    recorder.end(save)
    monkeypatch.setattr(recorder, "end_background", lambda record: 1 / 0)
    (finalize,) = functions
    finalize()
    assert "could not be recorded" in caplog.text


def test_a_held_span_ends_when_its_call_did_with_what_is_known_later(recorder, exporter):
    train = recorder.begin("megatron.train", LIVE)
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(step, hold=True)
    assert recorder.current is train
    assert not exporter.get_finished_spans()
    recorder.end_held({"megatron.loss": 2.5})
    recorder.drain()
    (span,) = exporter.get_finished_spans()
    assert span.end_time == step.end
    assert dict(span.attributes) == {"megatron.loss": 2.5}


def test_a_call_that_begins_as_recording_ends_is_not_held_for_what_comes_later(recorder, exporter):
    """A wrapper may have looked for its hook before it was taken out, and record the first call of the process."""
    recorder.flush(end_held=True)
    recorder.end(recorder.begin("megatron.train_step", LIVE), hold=True)
    recorder.flush()
    assert [span.name for span in exporter.get_finished_spans()] == ["megatron.train_step"]


@pytest.mark.parametrize("what", ["the next step", "the end of the loop", "the end of the process"])
def test_a_held_span_that_nobody_asks_for_ends_with(recorder, exporter, what):
    train = recorder.begin("megatron.train", LIVE)
    recorder.end(recorder.begin("megatron.train_step", LIVE), hold=True)
    if what == "the next step":
        recorder.end(recorder.begin("megatron.train_step", LIVE), hold=True)
    elif what == "the end of the loop":
        recorder.end(train)
    else:
        recorder.exit()
    recorder.drain()
    steps = [span for span in exporter.get_finished_spans() if span.name == "megatron.train_step"]
    assert len(steps) == 1


def test_whoever_flushes_the_provider_gets_what_waits_for_our_thread_too(recorder, provider, exporter, monkeypatch):
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    provider.force_flush()
    assert len(exporter.get_finished_spans()) == 1
    with recorder._draining:
        provider.force_flush()  # no one waits for our thread, which may be flushing itself


def test_what_comes_after_somebody_shut_the_provider_down_is_counted(recorder, provider, caplog):
    train = recorder.begin("megatron.train", LIVE)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    provider.force_flush()
    provider.shutdown()
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.end(train)
    recorder.exit()
    assert "2 spans were dropped" in caplog.text


def test_an_error_whose_text_cannot_be_had_ends_its_span_all_the_same(recorder, exporter):
    class MuteError(Exception):
        def __str__(self):
            raise ValueError("no text")

    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(step, MuteError())
    (span,) = finished(recorder, exporter).values()
    assert span.status.status_code is StatusCode.ERROR
    assert recorder.current is None


def test_the_text_of_an_error_is_bounded(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(step, RuntimeError("x" * 10_000_000))
    (span,) = finished(recorder, exporter).values()
    assert sum(len(value) for value in span.events[0].attributes.values()) < 70_000


def test_instrumenting_anew_inside_a_dropped_step_does_not_silence_what_comes_after(recorder, provider, exporter):
    recorder.connect_by(lambda: providers.connect({"traces": TracerProvider(sampler=ALWAYS_OFF)}, None, {}))
    step = recorder.begin("megatron.train_step", LIVE, None, ((1, 0, "megatron.train_step", 1, 0), 0), 1)
    assert recorder.begin("megatron.optimizer_step", LIVE) is None
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    recorder.end(step)
    assert recorder.muted == 0
    recorder.end(recorder.begin("megatron.evaluate", LIVE))
    assert "megatron.evaluate" in finished(recorder, exporter)


def test_connecting_a_thousand_times_leaves_nothing_behind_on_the_providers(recorder, exporter):
    reader = PeriodicExportingMetricReader(exporter_of_metrics := ConsoleMetricExporter(), 3_600_000)
    meters, tracers = MeterProvider([reader]), TracerProvider()
    for _ in range(1100):
        recorder.connect_by(lambda: providers.connect({"traces": tracers, "metrics": meters}, None, {}))
        recorder.connect()
    recorder.disconnect()
    assert len(tracers._active_span_processor._span_processors) == 1
    depth, export = 0, exporter_of_metrics.export
    while (inner := getattr(export, "__closure__", None)) and depth < 10:
        export = next((cell.cell_contents for cell in inner if callable(cell.cell_contents)), None)
        depth += 1
    assert depth <= 2
    meters.shutdown()
