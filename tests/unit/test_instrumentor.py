import argparse
import logging
import random
import signal
import subprocess
import sys
import threading
import time
import types
from importlib.metadata import entry_points

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from megatron_autoinstrument import MegatronInstrumentor, instrumentor, targets
from megatron_autoinstrument.process import signals

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
    instrumentor.RECORDER.reset_after_fork()


def spans(exporter):
    instrumentor.RECORDER.end_held()  # training_log would
    instrumentor.RECORDER.flush()
    return [span.name for span in exporter.get_finished_spans()]


def test_the_entry_point_is_found_under_its_name():
    (entry_point,) = entry_points(group="opentelemetry_instrumentor", name="megatron")
    assert entry_point.load() is MegatronInstrumentor


def test_it_depends_on_no_package_of_megatron(megatron):
    assert not list(megatron.instrumentation_dependencies())


def test_importing_it_imports_neither_torch_nor_megatron_and_takes_half_of_what_opentelemetrys_base_class_does():
    code = (
        "import time, sys\n"
        "start = time.process_time()\n"
        "import opentelemetry.instrumentation.instrumentor, opentelemetry.trace\n"
        "theirs = time.process_time()\n"
        "from megatron_autoinstrument import MegatronInstrumentor\n"
        "print((time.process_time() - theirs) / (theirs - start))\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'grpc')])\n"
        "print('opentelemetry.sdk.trace' in sys.modules)"
    )
    took = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        share, imported, sdk = out.split("\n")[:3]
        assert (imported, sdk) == ("", "False")
        took.append(float(share))
    assert min(took) < 0.5, took


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


@pytest.mark.parametrize("number", [number for number in signals.ENDING if number != signal.SIGINT])
def test_a_signal_is_handled_from_the_first_span_on_and_as_before_after_uninstrument(
    megatron, training, provider, number
):
    megatron.instrument(tracer_provider=provider)
    assert signal.getsignal(number) is signal.SIG_DFL
    training.train_step("model")
    assert signal.getsignal(number) == signals.TERMINATION._handle
    megatron.uninstrument()
    assert signal.getsignal(number) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_paused_takes_everything_out_for_a_while_and_puts_it_back(megatron, training, provider, exporter):
    originals = vars(training).copy()
    megatron.instrument(tracer_provider=provider)
    wrapped = vars(training).copy()
    assert wrapped != originals
    with megatron.paused():
        assert {name: vars(training)[name] for name in originals} == originals
        with megatron.paused():
            pass
        assert {name: vars(training)[name] for name in originals} == originals
    assert {name: vars(training)[name] for name in wrapped} == wrapped
    with megatron.paused():
        megatron.uninstrument()
    assert {name: vars(training)[name] for name in originals} == originals
    with megatron.paused():  # not instrumented at all
        pass
    assert {name: vars(training)[name] for name in originals} == originals


def test_of_pauses_that_overlap_the_last_one_ends_them(megatron, training, provider):
    original = training.train_step
    megatron.instrument(tracer_provider=provider)
    first, second = megatron.paused(), megatron.paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert training.train_step is original
    second.__exit__(None, None, None)
    assert training.train_step is not original


def test_a_signal_in_the_middle_of_a_switch_has_its_own_done_after_it(megatron, training, provider, monkeypatch):
    original = training.train_step
    install = instrumentor.PATCHER.install
    before = signal.signal(signal.SIGUSR1, lambda number, frame: megatron.uninstrument())

    def interrupted(*args):
        signal.raise_signal(signal.SIGUSR1)
        install(*args)

    monkeypatch.setattr(instrumentor.PATCHER, "install", interrupted)
    try:
        megatron.instrument(tracer_provider=provider)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert training.train_step is original
    assert not megatron.is_instrumented_by_opentelemetry


def test_a_switch_that_another_thread_is_busy_with_is_waited_for_so_long_at_most_and_loses_none(
    megatron, training, provider, monkeypatch
):
    monkeypatch.setattr(instrumentor, "_TURN_S", 0.05)
    original = training.train_step
    install, go_on = instrumentor.PATCHER.install, threading.Event()
    monkeypatch.setattr(instrumentor.PATCHER, "install", lambda *args: (go_on.wait(10), install(*args)))
    thread = threading.Thread(target=megatron.instrument, kwargs={"tracer_provider": provider})
    thread.start()
    megatron.uninstrument()  # gives up waiting
    go_on.set()
    thread.join()
    assert training.train_step is original
    assert not megatron.is_instrumented_by_opentelemetry


def test_uninstrumented_in_mid_run_training_does_not_wait_for_the_exporter(
    megatron, fake_module, provider, exporter, monkeypatch
):
    training = fake_module("megatron.training.training", "def train(inside):\n    inside()\n    inside()\n" + SOURCE)
    export, go_on = exporter.export, threading.Event()
    monkeypatch.setattr(exporter, "export", lambda spans: (go_on.wait(60), export(spans))[1])
    exported = []

    def step():
        if megatron.is_instrumented_by_opentelemetry:
            instrumentor.RECORDER.end(instrumentor.RECORDER.begin("megatron.microbatch.forward", "frequent"))
            megatron.uninstrument()
            exported.extend(exporter.get_finished_spans())
        go_on.set()

    megatron.instrument(tracer_provider=provider)
    training.train(step)
    assert not exported
    assert set(spans(exporter)) == {"megatron.microbatch.forward", "megatron.train"}


def test_uninstrumented_by_another_thread_sigterm_does_as_before_and_the_main_thread_can_put_it_back(
    megatron, training, provider
):
    previous = []
    before = signal.signal(signal.SIGTERM, lambda *args: previous.append(args))
    try:
        theirs = signal.getsignal(signal.SIGTERM)
        megatron.instrument(tracer_provider=provider)
        training.train_step("model")
        assert signal.getsignal(signal.SIGTERM) == signals.TERMINATION._handle
        thread = threading.Thread(target=megatron.uninstrument)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
        assert len(previous) == 1
        megatron.uninstrument()
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_switched_at_any_time_by_threads_and_signals_training_goes_on_and_no_record_is_left(
    megatron, fake_module, exporter, monkeypatch
):
    provider = TracerProvider()  # one that exports beside training: a handler could interrupt that otherwise
    provider.add_span_processor(BatchSpanProcessor(exporter))
    monkeypatch.setattr(logging.getLogger("opentelemetry.instrumentation.instrumentor"), "disabled", True)
    training = fake_module(
        "megatron.training.training",
        "def train(steps):\n    for step in steps:\n        assert train_step(step, step) == step\n" + SOURCE,
    )
    originals = vars(training).copy()
    end = time.monotonic() + 0.5
    switches = 0

    def goes_on():  # longer on a busy machine
        return time.monotonic() < end + (0 if switches > 20 else 60)

    def switch(draw):
        nonlocal switches
        switches += 1
        what = draw.choice([megatron.uninstrument, lambda: megatron.instrument(tracer_provider=provider), None])
        if what is not None:
            what()
        else:
            with megatron.paused():
                pass

    def run(seed):
        draw = random.Random(seed)
        while goes_on():
            time.sleep(draw.random() * 0.002)
            switch(draw)

    def alarm(number, frame, draw=random.Random(2)):  # noqa: B008
        switch(draw)
        if goes_on():
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0001, 0.004))

    def steps():
        step = 0
        while goes_on():
            step += 1
            yield step

    megatron.instrument(tracer_provider=provider)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        for thread in threads:
            thread.start()
        training.train(steps())
        for thread in threads:
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    megatron.uninstrument()
    while not instrumentor.RECORDER.flush():  # what the last one in mid-run has asked for comes before
        pass  # each flush has a bound of seconds, which a busy machine may take
    provider.shutdown()
    assert switches > 20
    assert {name: vars(training)[name] for name in originals} == originals
    assert instrumentor.RECORDER.current is None
    assert instrumentor.RECORDER._held is None
    assert instrumentor.RECORDER.dropped == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finished = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in finished}
    assert {(span.name, names[span.parent.span_id] if span.parent else None) for span in finished} <= {
        ("megatron.train", None),
        ("megatron.train_step", None),
        ("megatron.train_step", "megatron.train"),
    }


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
        sys.modules.pop(name, None)


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
    monkeypatch.setattr("megatron_autoinstrument.megatron.patching.reraise_internal_errors", False)
    failures = [RuntimeError("broken")]

    def fails_once(new):
        if failures:
            raise failures.pop()

    monkeypatch.setattr("megatron_autoinstrument.megatron.patching._rebind", fails_once)
    original = training.train_step
    megatron.instrument(tracer_provider=provider)
    assert training.train_step is original
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_exporter_that_cannot_be_had_costs_one_message_and_no_training(megatron, monkeypatch, training, caplog):
    monkeypatch.setattr("megatron_autoinstrument.megatron.patching.reraise_internal_errors", False)
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "no_such_exporter")
    megatron.instrument()
    for _ in range(3):
        assert training.train_step("model") == "model"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no_such_exporter" in record.getMessage()


FLAGGED = """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--lr", type=float)
    return parser
def _add_network_size_args(parser):
    return parser
"""


@pytest.fixture
def arguments(fake_module):
    fake_module(
        "megatron.training.global_vars",
        "_GLOBAL_ARGS = None\ndef set_args(args):\n    global _GLOBAL_ARGS\n    _GLOBAL_ARGS = args\n",
    )
    return fake_module("megatron.training.arguments", FLAGGED)


def parse(arguments, *words):
    return arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args(words)


@pytest.mark.parametrize("environment", [{}, {"MEGATRON_OTEL_ENABLED": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_the_flags_are_accepted_on_every_rank_and_with_the_kill_switch_on(
    megatron, monkeypatch, arguments, provider, environment
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    megatron.instrument(tracer_provider=provider)
    args = parse(arguments, "--otel-enabled", "--otel-service-name", "llama", "--otel-span-groups=all")
    assert (args.otel_enabled, args.otel_service_name, args.otel_span_groups) == (True, "llama", "all")
    assert parse(arguments).otel_enabled is None  # so that args_defaults can set it


def test_megatrons_own_flags_stay(megatron, arguments, provider):
    add = arguments.add_megatron_arguments

    def with_its_own(parser):
        parser = add(parser)
        parser.add_argument("--otel-enabled", action="store_const", const="theirs")
        return parser

    arguments.add_megatron_arguments = with_its_own
    megatron.instrument(tracer_provider=provider)
    args = parse(arguments, "--otel-enabled", "--otel-span-groups", "all")
    assert (args.otel_enabled, args.otel_span_groups) == ("theirs", "all")


def test_an_older_parser_gets_them_with_its_first_arguments(megatron, arguments, provider):
    del arguments.add_megatron_arguments
    megatron.instrument(tracer_provider=provider)
    parser = arguments._add_network_size_args(argparse.ArgumentParser())
    assert parser.parse_args(["--otel-enabled"]).otel_enabled is True


def test_the_groups_of_the_flag_replace_those_of_the_variable(megatron, arguments, training, monkeypatch, provider):
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "job")
    original = training.train_step
    megatron.instrument(tracer_provider=provider)
    assert training.train_step is original
    global_vars = sys.modules["megatron.training.global_vars"]
    global_vars.set_args(parse(arguments, "--otel-span-groups", "step"))
    assert training.train_step is not original
    megatron.uninstrument()
    assert training.train_step is original


@pytest.mark.parametrize(("environment", "patched"), [({}, True), ({"MEGATRON_OTEL_ENABLED": "0"}, False)])
def test_the_flag_alone_turns_on_what_was_only_waiting_for_flags(
    megatron, arguments, training, monkeypatch, environment, patched
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    original = training.train_step
    instrumentor.accept_flags()
    assert training.train_step is original
    sys.modules["megatron.training.global_vars"].set_args(parse(arguments, "--otel-enabled"))
    assert (training.train_step is not original) == patched
    instrumentor.PATCHER.uninstall()


@pytest.mark.parametrize(
    ("folders", "environment", "stands_aside", "said"),
    [
        (["megatron/core/telemetry", "nemo/lens"], {"MEGATRON_OTEL_ENABLED": "1"}, True, "stands aside"),
        (["megatron/core/telemetry", "nemo/lens"], {"NEMO_LENS_ENABLED": "1"}, True, "stands aside"),
        (["megatron/core/telemetry", "nemo/lens"], {}, False, "installed and off"),
        (["megatron/core/telemetry"], {"MEGATRON_OTEL_ENABLED": "1"}, False, None),
        (["megatron/core", "nemo/lens"], {"MEGATRON_OTEL_ENABLED": "1"}, False, None),  # a release
    ],
)
@pytest.mark.parametrize(
    ("rank", "strategy", "records", "says"),
    [(1, "single_rank", True, True), (0, "single_rank", False, False), (1, "all_ranks", True, False)],
)
def test_it_stands_aside_for_megatrons_own_telemetry_and_says_so_once(
    megatron,
    monkeypatch,
    tmp_path,
    arguments,
    training,
    provider,
    caplog,
    folders,
    environment,
    stands_aside,
    said,
    rank,
    strategy,
    records,
    says,
):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        package = tmp_path / folder.partition("/")[0]
        (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    environment = {**environment, "MEGATRON_OTEL_RANK_STRATEGY": strategy, "RANK": str(rank), "WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    original = training.train_step
    megatron.instrument(tracer_provider=provider)
    sys.modules["megatron.training.global_vars"].set_args(types.SimpleNamespace(rank=rank, world_size=2))
    assert (training.train_step is not original) == (records and not stands_aside)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (said is not None and says)
    assert all(said in message for message in messages)


def test_seams_are_told_apart_and_each_names_groups_that_exist():
    from megatron_autoinstrument.common.groups import FLAGS, GROUPS, LOGS, METRICS

    assert len({(seam.module, seam.path) for seam in targets.SEAMS}) == len(targets.SEAMS)
    assert all(seam.groups <= {*GROUPS, METRICS, LOGS, FLAGS} for seam in targets.SEAMS)


def test_flags_on_the_command_line_are_known_until_megatron_has_parsed_them(megatron, fake_module, monkeypatch):
    arguments = fake_module("megatron.training.arguments", "def add_megatron_arguments(parser): return parser\n")
    known = fake_module("megatron.training.global_vars", "_GLOBAL_ARGS = None\ndef set_args(args): pass\n")

    def parses():
        words = ["--otel-span-groups=all"]
        return arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_known_args(words)[1] == []

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--otel-span-groups=all"])
    megatron.instrument()
    with megatron.paused():
        assert parses()
    assert parses()
    megatron.uninstrument()
    assert parses()
    known._GLOBAL_ARGS = object()
    megatron.instrument()
    megatron.uninstrument()
    assert not parses()
