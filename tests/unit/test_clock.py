"""The wall clock may be stepped between any two instructions; spans have one clock all the same."""

import random
import threading

import pytest

from megatron_autoinstrument.recording import record
from megatron_autoinstrument.recording import recorder as recording
from megatron_autoinstrument.recording.record import FREQUENT, LIVE, SILENT
from megatron_autoinstrument.recording.traces import Traces

HOUR = 3600 * 10**9
MS = 10**6


class Clocks:
    """A monotonic clock that goes on with each look at it, and a wall clock that somebody steps."""

    def __init__(self, monkeypatch, draw=None):
        self.monotonic, self.shift, self.draw = 5 * HOUR, 1000 * HOUR, draw
        for module in (recording, record):
            monkeypatch.setattr(module, "monotonic_ns", self.monotonic_ns)
        monkeypatch.setattr(record, "time_ns", self.time_ns)

    def tick(self):
        self.monotonic += self.draw.randrange(1, MS) if self.draw else MS
        if self.draw and self.draw.random() < 0.1:
            self.shift += self.draw.choice((-HOUR, HOUR))

    def monotonic_ns(self):
        self.tick()
        return self.monotonic

    def time_ns(self):
        self.tick()
        return self.monotonic + self.shift


def grow(recorder, draw, depth):
    """Calls that nest at random, as Megatron's do in a step."""
    for _ in range(draw.randrange(3)):
        what = draw.random()
        if what < 0.2:
            records = recorder.begin_together(["megatron.p2p.send_forward", "megatron.p2p.recv_backward"], {})
            recorder.end_together(records, None)
            continue
        name = f"call {depth} {draw.randrange(3)}"
        kind = draw.choice((FREQUENT, FREQUENT, LIVE, SILENT))
        if what < 0.4 and recorder.current is not None:  # on a thread of its own
            thread = threading.Thread(target=lambda: recorder.end(recorder.begin(name, kind)))  # noqa: B023
            thread.start()
            thread.join()
            continue
        call = recorder.begin(name, kind)
        if depth < 4:
            grow(recorder, draw, depth + 1)
        recorder.end(call, ValueError("bad") if draw.random() < 0.1 else None)
        if draw.random() < 0.2:
            recorder.drain()  # also while what is around runs


def train(recorder, draw, per_step):
    run = recorder.begin_deferred("megatron.pretrain")
    recorder.end(recorder.begin("megatron.model_init", LIVE))
    loop = recorder.begin("megatron.train", LIVE)
    writes = []
    for iteration in range(1, 8):
        identity = ((iteration, 0, "megatron.train_step", iteration, 0), 0)
        step = recorder.begin("megatron.train_step", LIVE, {}, identity, iteration if per_step else None)
        grow(recorder, draw, 0)
        recorder.end(step, hold=True)
        if draw.random() < 0.8:
            recorder.end_held({"megatron.loss": 1.0})
        if draw.random() < 0.5:
            save = recorder.begin("megatron.save_checkpoint", LIVE)
            writes.append(recorder.begin_background("megatron.save_checkpoint.async_write", loop, {}, save))
            grow(recorder, draw, 0)
            recorder.end(save)
        if writes and draw.random() < 0.5:
            recorder.end_background(writes.pop())
        if draw.random() < 0.5:
            evaluation = recorder.begin("megatron.evaluate", LIVE)
            grow(recorder, draw, 0)
            recorder.end(evaluation)
    if draw.random() < 0.5:
        recorder.close_open_records("SIGTERM")
    else:
        for write in writes:
            recorder.end_background(write)
        recorder.end(loop)
        recorder.end(run)
    recorder.drain(final=True)


@pytest.mark.parametrize("scope", ["run", "step"])
@pytest.mark.parametrize("seed", range(20))
def test_no_span_ends_before_it_starts_or_outside_its_parent_however_the_wall_clock_is_stepped(
    recorder, exporter, monkeypatch, seed, scope
):
    draw = random.Random(seed)
    Clocks(monkeypatch, draw)
    recorder._plan = lambda connection, run: Traces("run", 0, scope == "step", 1 << 100)
    train(recorder, draw, scope == "step")
    found = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in found}
    assert len(found) > 10
    assert {"megatron.pretrain", "megatron.train", "megatron.train_step"} <= {span.name for span in found}
    for span in found:
        assert span.start_time <= span.end_time, span.name
        assert all(event.timestamp == span.end_time for event in span.events)
        if span.parent is not None:
            around = by_id[span.parent.span_id]
            assert around.start_time <= span.start_time, (around.name, span.name)
            assert span.end_time <= around.end_time, (around.name, span.name)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_step_has_the_wall_clock_of_its_start_and_the_length_that_it_had(recorder, exporter, monkeypatch, hours):
    clocks = Clocks(monkeypatch)
    loop = recorder.begin("megatron.train", LIVE)
    for iteration in range(2):
        step = recorder.begin(
            "megatron.train_step", LIVE, {}, ((iteration, 0, "megatron.train_step"), 0), iteration + 7
        )
        begun = clocks.monotonic + clocks.shift
        inner = recorder.begin("megatron.microbatch.forward", FREQUENT)
        clocks.shift += hours * HOUR
        recorder.end(inner)
        recorder.end(step)
        recorder.drain()
        got = {span.name: span for span in exporter.get_finished_spans()}
        exporter.clear()
        step, inner = got["megatron.train_step"], got["megatron.microbatch.forward"]
        assert abs(step.start_time - begun) <= 2 * MS
        assert step.end_time - step.start_time < 10 * MS
        assert inner.end_time - inner.start_time == MS
    recorder.end(loop)


def test_an_error_is_recorded_once_also_where_the_wall_clock_was_stepped_inside(recorder, exporter, monkeypatch):
    clocks = Clocks(monkeypatch)
    loop = recorder.begin("megatron.train", LIVE)
    clocks.shift -= HOUR
    step = recorder.begin("megatron.train_step", LIVE, {}, ((1, 0, "megatron.train_step"), 0), 7)
    clocks.shift += 3 * HOUR
    error = ValueError("bad")
    recorder.end(step, error)
    recorder.end(loop, error)
    assert [len(span.events) for span in exporter.get_finished_spans()] == [1, 0]


def test_a_call_costs_one_look_at_the_clock_at_each_end(recorder, monkeypatch):
    step = recorder.begin("megatron.train_step", LIVE)
    clocks = Clocks(monkeypatch)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    assert clocks.monotonic == 5 * HOUR + 2 * MS
    recorder.end(step)
