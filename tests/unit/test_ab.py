"""Blocks of steps with and without instrumentation, on a training loop whose clock and cost are known."""

import contextlib
import inspect
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
    """Trains so many steps; each takes 1,000, and `cost` more where it is instrumented. In those of `at`, does what
    it says."""

    def trained(steps, cost=0, noise=0, length=8, leave=None, at=None, replaced=()):
        for name in ("megatron", "megatron.training"):
            fake_module(name)
        training = fake_module("megatron.training.training", TRAINING)
        arguments = types.SimpleNamespace(log_interval=1000)
        training.global_vars = fake_module("megatron.training.global_vars", "def set_args(args): pass")
        training.global_vars._GLOBAL_ARGS = arguments
        monkeypatch.setenv("MEGATRON_OTEL_AB", str(length))
        monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "job,step")
        instrumented = []
        draw = random.Random(1)

        def work():
            on = bool(instrumentor.PATCHER.groups)
            instrumented.append(on)
            extra = cost(len(instrumented)) if callable(cost) else cost
            clock.now += 1000 + extra * on + int(draw.gauss(0, noise) if noise else 0)
            (at or {}).get(len(instrumented), bool)()
            if len(instrumented) == leave:
                sys.exit(0)

        training.work = work
        MegatronInstrumentor().instrument(tracer_provider=provider)
        for name in replaced:
            code = inspect.unwrap(getattr(training, name)).__code__
            setattr(training, name, types.FunctionType(code, vars(training)))
        if replaced:
            training.global_vars.set_args(arguments)
        try:
            training.train(steps)
            training.recorded_after = bool(instrumentor.PATCHER.groups)
            training.comparison = instrumentor._comparison
        except SystemExit:
            pass
        finally:
            MegatronInstrumentor().uninstrument()
            instrumentor.RECORDER.reset_after_fork()
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


@pytest.mark.parametrize(
    "replaced", [["train"], ["train_step"], ["training_log"], ["train", "train_step", "training_log"]]
)
def test_functions_that_somebody_replaced_are_compared_too(trained, replaced):
    instrumented, spans, told, _ = trained(8 * 22, cost=30, replaced=replaced)
    assert instrumented == [ab.is_on(step // 8) for step in range(8 * 22)]
    assert told.startswith("megatron-autoinstrument, overhead: +3.00 % of a step")
    assert sum(span.name == "megatron.train_step" for span in spans) == sum(instrumented)


def test_noise_widens_the_interval_and_it_holds_the_cost(trained):
    _, spans, *_ = trained(8 * 62, cost=20, noise=10)
    (train,) = [span for span in spans if span.name == "megatron.train"]
    low, high = (train.attributes[f"megatron.ab.overhead_percent.{bound}"] for bound in ("low", "high"))
    assert low < 2.0 < high
    assert 0 < high - low < 1


def test_a_cost_that_comes_in_bursts_counts_by_what_it_takes_of_a_block(trained):
    _, spans, *_ = trained(8 * 22, cost=lambda step: 120 * (step % 8 == 5))  # one of the six that count
    (train,) = [span for span in spans if span.name == "megatron.train"]
    assert train.attributes["megatron.ab.overhead_percent"] == pytest.approx(2.0)


def test_what_megatrons_log_costs_is_part_of_a_step(trained, monkeypatch, clock):
    release = instrumentor.RECORDER.end_held

    def slow(*args):
        clock.now += 10
        release(*args)

    monkeypatch.setattr(instrumentor.RECORDER, "end_held", slow)
    _, spans, *_ = trained(8 * 22)
    (train,) = [span for span in spans if span.name == "megatron.train"]
    assert train.attributes["megatron.ab.overhead_percent"] >= 1.0


def test_noise_and_stalls_pull_the_figure_to_neither_side():
    draw = random.Random(1)

    def step():
        return 100 * (1 + draw.gauss(0, 0.1)) + (1000 if draw.random() < 0.05 else 0)

    found = ab.overhead([(step(), step() * 1.02) for _ in range(500)])
    assert found.low < 2.0 < found.high
    assert found.high - found.low < 5


# What a pair's ratio, of which 1.02 is the median, may be like.
RATIOS = {
    "normal": lambda draw: 1.02 + draw.gauss(0, 0.05),
    "skewed": lambda draw: 1.02 * draw.lognormvariate(0, 0.5),
    "heavy-tailed": lambda draw: abs(1.02 + 0.01 * draw.gauss(0, 1) / draw.gauss(0, 1)),
    "two-humped": lambda draw: 1.02 + draw.choice((-0.1, 0.1)) * draw.random(),
    "drifting": None,  # steps get longer and longer, to which the order of a pair's blocks adds or takes away
}


def pairs_of(ratios, count, draw):
    if RATIOS[ratios] is not None:
        return [(100.0, 100.0 * RATIOS[ratios](draw)) for _ in range(count)]
    return [(100.0, 100.0 * (1.02 + 0.01 * (-1) ** number + draw.gauss(0, 0.005))) for number in range(count)]


@pytest.mark.parametrize("ratios", RATIOS)
@pytest.mark.parametrize("count", [*range(8, 21), 30, 50])
def test_the_interval_holds_the_truth_as_often_as_it_says(ratios, count):
    draw, times = random.Random(count), 400
    found = [ab.overhead(pairs_of(ratios, count, draw)) for _ in range(times)]
    held = sum(each.low <= 2.0 <= each.high for each in found)
    share = found[0].confidence / 100
    assert 0.95 <= share <= 0.9925
    # Four standard errors of the number that hold.
    assert held >= times * share - 4 * (times * share * (1 - share)) ** 0.5


def test_the_interval_leaves_as_many_pairs_outside_as_it_may():
    def bounds(count):
        found = ab.overhead([(100.0, 100.0 + number) for number in range(1, count + 1)])
        return round(found.low), round(found.high), round(found.confidence, 2)

    # From a table of the sign test.
    assert bounds(8) == (1, 8, 99.22)
    assert bounds(9) == (2, 8, 96.09)
    assert bounds(12) == (3, 10, 96.14)
    assert bounds(20) == (6, 15, 95.86)
    assert bounds(50) == (18, 33, 96.72)


def test_the_interval_of_a_very_long_run_is_found_at_once():
    draw = random.Random(1)
    found = ab.overhead([(1.0, 1.02 + draw.gauss(0, 0.1)) for _ in range(25_000)])
    assert found.low < 2.0 < found.high
    assert found.high - found.low < 0.5
    assert found.confidence < 95.1


@pytest.mark.parametrize("none", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_left_out(none):
    good = [(100.0, 103.0)] * 8
    found = ab.overhead([*good, (none, 100.0), (100.0, none)])
    assert found == ab.overhead(good)
    assert found.pairs == 8
    assert ab.overhead([*good[1:], (none, 100.0)]) is None


def test_a_clock_that_stands_still_costs_the_figure_and_not_the_run(trained, clock, monkeypatch):
    monkeypatch.setattr(ab, "perf_counter_ns", lambda: 0)
    instrumented, spans, told, _ = trained(8 * 22)
    assert len(instrumented) == 8 * 22
    assert "too few" in told
    assert not any("overhead" in key for span in spans for key in span.attributes)


def test_blocks_too_short_for_exporting_to_fall_into_them_are_told(trained):
    assert "a part of the exporting falls between them and isn't counted" in trained(8 * 22)[2]


def switch_off():
    MegatronInstrumentor().uninstrument()


@pytest.mark.parametrize("step", [8 * 3 + 2, 8 * 2 + 2, 8 * 4, 8 * 6])  # within a block of each kind, in its last step
def test_uninstrumented_in_mid_run_it_stays_out(trained, provider, step):
    instrumented, _, told, training = trained(8 * 30, at={step: switch_off})
    assert not any(instrumented[step:])
    assert "too few steps ran" in told
    for name in ("train", "train_step", "training_log"):
        assert not hasattr(training[name], "__wrapped__")


@pytest.mark.parametrize("step", [8 * 3 + 2, 8 * 2 + 2])
def test_paused_it_waits_and_goes_on_with_the_block(trained, step):
    pause = contextlib.ExitStack()
    at = {step: lambda: pause.enter_context(MegatronInstrumentor().paused()), step + 20: pause.close}
    instrumented, _, told, _ = trained(8 * 22 + 21, cost=30, at=at)
    assert not any(instrumented[step : step + 20])
    blocks = instrumented[: step - 1] + instrumented[step + 20 :]
    assert blocks == [ab.is_on(step // 8) for step in range(len(blocks))]
    assert "+3.00 % of a step" in told


def test_what_comes_after_the_steps_is_recorded(trained):
    instrumented, *_, training = trained(8 * 22)
    assert not instrumented[-1]
    assert training["recorded_after"]


def test_wrappers_are_not_made_anew_for_each_block(trained):
    *_, training = trained(8 * 22)
    assert len(training["comparison"]._steps._patches) == 4  # of two functions: on top of ours, and of Megatron's own


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
