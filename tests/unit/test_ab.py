"""Blocks of steps with and without instrumentation, on a training loop whose clock and cost are known."""

import random
import sys
import types

import pytest

from megatron_autoinstrument import MegatronInstrumentor, ab, instrumentor

TRAINING = """
_TRAIN_START_TIME = 1.0
def train(steps):
    for iteration in range(steps):
        train_step(iteration=iteration)
        training_log({}, {}, 0.1, iteration + 1, 0, None, False)
def train_step(iteration):
    work()
def training_log(loss_dict, total_loss_dict, learning_rate, iteration, skipped_iter, grad_norm, is_first_iteration):
    pass
def work():
    pass
"""


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=0)
    monkeypatch.setattr(ab, "perf_counter_ns", lambda: clock.now)
    return clock


@pytest.fixture
def trained(fake_module, monkeypatch, provider, exporter, clock, capsys):
    """Trains so many steps; each takes 1,000, and `cost` more where it is instrumented."""

    def trained(steps, cost=0, noise=0, length=8, leave=None):
        for name in ("megatron", "megatron.training"):
            fake_module(name)
        training = fake_module("megatron.training.training", TRAINING)
        arguments = types.SimpleNamespace(log_interval=1000)
        fake_module("megatron.training.global_vars")._GLOBAL_ARGS = arguments
        monkeypatch.setenv("MEGATRON_OTEL_AB", str(length))
        monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "job,step")
        instrumented = []
        draw = random.Random(1)

        def work():
            on = bool(instrumentor.LEDGER.groups)
            instrumented.append(on)
            clock.now += 1000 + cost * on + int(draw.gauss(0, noise) if noise else 0)
            if len(instrumented) == leave:
                sys.exit(0)

        training.work = work
        MegatronInstrumentor().instrument(tracer_provider=provider)
        try:
            training.train(steps)
        except SystemExit:
            pass
        finally:
            MegatronInstrumentor().uninstrument()
            instrumentor.RECORDER.abandon()
        return instrumented, exporter.get_finished_spans(), capsys.readouterr().out, vars(training)

    return trained


def test_blocks_take_turns_in_pairs_of_alternating_order():
    assert [ab.is_on(block) for block in range(10)] == [True, False, False, True, True, False, False, True, True, False]


def test_the_cost_of_a_step_is_found_and_told(trained):
    instrumented, spans, told, training = trained(8 * 22, cost=30)
    assert instrumented == [ab.is_on(step // 8) for step in range(8 * 22)]
    assert told.startswith("megatron-autoinstrument, overhead: +3.00 % of a step")
    (train,) = [span for span in spans if span.name == "megatron.train"]
    assert {key: round(value, 6) for key, value in train.attributes.items() if "ab" in key} == {
        "megatron.ab.overhead_percent": 3.0,
        "megatron.ab.overhead_percent.low": 3.0,
        "megatron.ab.overhead_percent.high": 3.0,
        "megatron.ab.pairs": 10,
    }
    assert sum(span.name == "megatron.train_step" for span in spans) == sum(instrumented)
    assert not hasattr(training["train_step"], "__wrapped__")
    assert not hasattr(training["train"], "__wrapped__")


def test_noise_widens_the_interval_and_it_holds_the_cost(trained):
    _, spans, *_ = trained(8 * 62, cost=20, noise=10)
    (train,) = [span for span in spans if span.name == "megatron.train"]
    low, high = (train.attributes[f"megatron.ab.overhead_percent.{bound}"] for bound in ("low", "high"))
    assert low < 2.0 < high
    assert 0 < high - low < 1


def test_too_few_steps_say_so(trained):
    _, spans, told, _ = trained(8 * 6)
    assert "too few steps ran to tell: 2 pairs of blocks of 8, not 8" in told
    (train,) = [span for span in spans if span.name == "megatron.train"]
    assert train.attributes["megatron.ab.pairs"] == 2
    assert "megatron.ab.overhead_percent" not in train.attributes


@pytest.mark.parametrize("leave", [8 * 21 + 3, 8 * 20 + 3])  # in a block of each kind
def test_a_loop_that_is_left_by_sys_exit_tells_too(trained, leave):
    _, spans, told, _ = trained(8 * 30, cost=10, leave=leave)
    assert "+1.00 % of a step" in told
    assert any("megatron.ab.overhead_percent" in span.attributes for span in spans)


def test_without_the_variable_nothing_is_compared(trained):
    _, spans, told, _ = trained(8 * 22, length=0)
    assert not told
    assert sum(span.name == "megatron.train_step" for span in spans) == 8 * 22
