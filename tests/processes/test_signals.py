"""What the signals that schedulers send do to a process of ours. Each runs in one of its own: the signal ends it."""

import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

START = """
import asyncio, atexit, faulthandler, functools, hashlib, os, signal, sys, threading, time
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from megatron_autoinstrument import instrumentor
from megatron_autoinstrument.export import providers
from megatron_autoinstrument.process import signals
from megatron_autoinstrument.process.signals import TERMINATION
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import FREQUENT, LIVE

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Exporter(SpanExporter):
    hangs, takes = False, 0
    def export(self, spans):
        time.sleep(60 if self.hangs else self.takes)
        for span in spans:
            say(span.name, span.status.status_code.name, span.attributes.get("error.type"), len(span.events))
        return SpanExportResult.SUCCESS

exporter, provider = Exporter(), TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(BatchSpanProcessor(exporter))
RECORDER.connect_by(lambda: providers.connect({"traces": provider}, None, {}))

def install():
    signals.install(RECORDER.terminate, RECORDER.request_flush)

def begin():
    RECORDER.begin("megatron.train", LIVE)
    RECORDER.end(RECORDER.begin("done", FREQUENT))
    RECORDER.begin_together(["megatron.p2p.send_forward", "megatron.p2p.recv_backward"], {})

def end(number=signal.SIGTERM):
    os.kill(os.getpid(), number)

def stuck():  # in C, which a signal doesn't interrupt
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def soon(call, seconds=0.5):
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()

say("AT", time.monotonic())
"""


def lines(name):
    """What is exported where the signal `name` ends the process."""
    return {
        "done UNSET None 0",
        f"megatron.train ERROR {name} 0",
        f"megatron.p2p.send_forward ERROR {name} 0",
        f"megatron.p2p.recv_backward ERROR {name} 0",
    }


ALL = lines("SIGTERM")
CLOSED = {line.replace("ERROR SIGTERM", "UNSET None") for line in ALL}
SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")


def run(code):
    """What the process did and printed, and how long it took without its imports."""
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=50)
    ended = time.monotonic()  # of one clock in all processes
    start, *lines = done.stdout.splitlines()
    return done, set(lines), ended - float(start.removeprefix("AT "))


# {n} is the signal's number. SIGINT is by default where it is set so: Python's own handler raises.
OF_EACH_SIGNAL = {
    "by default": "{dfl}install(); begin(); end({n}); say('alive')",
    "by default, in C": "{dfl}install(); begin(); soon(lambda: end({n})); stuck()",
    "what goes on": """
def goes_on(what):
    end({n})
    time.sleep(0.1)
    say(what)
    RECORDER.end(RECORDER.begin(what, FREQUENT))
begin()
signal.signal({n}, signal.SIG_IGN); install()
assert signal.getsignal({n}) is signal.SIG_IGN
goes_on("ignored")
TERMINATION.uninstall()
signal.signal({n}, lambda number, frame: say("theirs", number)); install()
goes_on("handled")
TERMINATION.uninstall()
if {n} != signal.SIGTERM:
    # C code's, above Python's handler and the default action.
    for handler in (signal.getsignal({n}), signal.SIG_DFL):
        signal.signal({n}, handler)
        faulthandler.register({n}, all_threads=False); install()
        assert signal.getsignal({n}) == handler
        goes_on("dumped")
        faulthandler.unregister({n})
        TERMINATION.uninstall()
signal.signal({n}, signal.SIG_DFL); install()
signal.signal({n}, lambda number, frame: say("later", number))
goes_on("replaced")
""",
}


@cache
def of_each_signal():
    """The programs of that table, begun side by side."""
    pool = ThreadPoolExecutor(4)
    started = {}
    for name in SIGNALS:
        number = getattr(signal, name)
        default = f"signal.signal({number}, signal.SIG_DFL); " if name == "SIGINT" else ""
        for what, code in OF_EACH_SIGNAL.items():
            started[what, name] = pool.submit(run, code.replace("{n}", str(int(number))).replace("{dfl}", default))
    return started


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("what", ["by default", "by default, in C"])
def test_a_signal_whose_default_action_ends_a_process_ends_it_all_the_same_and_loses_nothing(what, name):
    done, printed, _ = of_each_signal()[what, name].result()
    assert done.returncode == -getattr(signal, name), done.stderr
    assert printed == lines(name)
    assert not done.stderr


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_that_is_ignored_or_handled_by_python_or_c_code_does_what_it_did(name):
    done, printed, _ = of_each_signal()["what goes on", name].result()
    assert done.returncode == 0, done.stderr
    went_on = {"ignored", "handled", "replaced"} | ({"dumped"} if name != "SIGTERM" else set())
    said = {f"{who} {int(getattr(signal, name))}" for who in ("theirs", "later")}
    assert printed == CLOSED | went_on | said | {f"{what} UNSET None 0" for what in went_on}
    assert done.stderr.count("most recent call first") == (2 if name != "SIGTERM" else 0)


def test_pythons_own_handler_of_sigint_stays():
    code = """
install(); begin()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:
    end(signal.SIGINT)
except KeyboardInterrupt as error:
    RECORDER.end(RECORDER.current, error)
    raise
"""
    done, printed, _ = run(code)
    assert done.returncode == -signal.SIGINT
    assert "megatron.p2p.send_forward ERROR KeyboardInterrupt 1" in printed
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("name", ["SIGQUIT", "SIGXCPU"])
def test_a_signal_that_dumps_core_still_does(name, tmp_path):
    def status(code):
        process = subprocess.Popen(
            [sys.executable, "-c", START + code],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            cwd=tmp_path,  # where the core may be
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2
            ),
        )
        return os.waitpid(process.pid, 0)[1]

    assert status(f"install(); begin(); end(signal.{name})") == status(f"end(signal.{name})")


@pytest.mark.parametrize(
    ("first", "code"),
    [
        # srun signals torchrun and its workers, and torchrun then the workers once more.
        ("SIGTERM", "soon(end, 0.1); end()"),
        ("SIGTERM", "soon(end, 0.2); soon(end, 0.3); stuck()"),
        # The first one ends it, whatever else comes.
        ("SIGUSR1", "soon(end, 0.1); end(signal.SIGUSR1)"),
        ("SIGHUP", "soon(end, 0.4); soon(lambda: end(signal.SIGHUP), 0.2); stuck()"),
    ],
)
def test_a_signal_that_comes_again_at_once_loses_nothing(first, code):
    done, printed, _ = run("signals._SAME_S = 10; install(); begin(); exporter.takes = 0.3\n" + code)
    assert done.returncode == -getattr(signal, first), done.stderr
    assert printed == lines(first)
    assert not done.stderr


def test_a_process_that_is_stopped_for_a_while_goes_on_and_then_ends_with_all_it_recorded():
    code = """
install(); begin()
def stop_for_a_second():
    os.system(f"(sleep 1; kill -CONT {os.getpid()}) &")
    end(signal.SIGSTOP)
stop_for_a_second()
RECORDER.end(RECORDER.begin("after", FREQUENT))
exporter.takes = 0.3
soon(stop_for_a_second, 0.1)
end()
"""
    done, printed, took = run(code)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert printed == ALL | {"after UNSET None 0"}
    assert not done.stderr
    assert took > 2


def test_a_handler_that_runs_often_has_what_is_closed_exported_now_and_then():
    code = """
calls = []
RECORDER.request_flush = lambda: calls.append(0)
signal.signal(signal.SIGALRM, lambda *args: None); install()
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
started = time.monotonic()
while time.monotonic() - started < 1:
    pass
signal.setitimer(signal.ITIMER_REAL, 0)
assert 1 <= len(calls) <= 6, calls
"""
    done, _, _ = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "install(); begin(); end(); say('alive')",
        "install(); begin(); soon(end); stuck()",
        "install(); begin(); soon(end); threading.Thread(target=stuck, daemon=True).start(); time.sleep(60)",
        # Whatever the interrupted code was at.
        "install(); begin(); soon(end, 0); RECORDER.flush(); time.sleep(60)",
        # Handlers of C, which Python doesn't know of.
        "faulthandler.register(signal.SIGTERM, chain=True); install(); begin(); end()",
        "install(); faulthandler.register(signal.SIGTERM, chain=True); begin(); end()",
        "faulthandler.register(signal.SIGTERM, chain=True); install(); begin(); soon(end); stuck()",
        # Somebody else's wakeup file, and somebody who takes ours.
        "import socket; a, b = socket.socketpair(); b.setblocking(False); signal.set_wakeup_fd(b.fileno())\n"
        "install(); begin(); end()",
        "install(); begin(); loop = asyncio.new_event_loop(); loop.add_signal_handler(signal.SIGUSR1, print); end()",
        # The first with the main thread in C, where no handler of Python's runs.
        "import socket; a, b = socket.socketpair(); b.setblocking(False); signal.set_wakeup_fd(b.fileno())\n"
        "install(); begin(); soon(end); stuck()",
    ],
)
def test_sigterm_by_default_ends_what_is_open_as_cut_off_exports_everything_and_then_ends_the_process(code):
    done, lines, took = run(code)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert lines == ALL
    assert took < 5
    if "faulthandler" in code:
        assert "most recent call first" in done.stderr
    else:
        assert not done.stderr


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        # One that goes on, like that of --exit-signal-handler: nothing is closed for it.
        ("signal.signal(signal.SIGTERM, lambda *a: say('theirs')); install(); begin(); end()", 0, {"theirs"} | CLOSED),
        # What is closed is exported at once, although they end the process without any exit.
        (
            "signal.signal(signal.SIGTERM, lambda *a: (time.sleep(0.5), os._exit(4))); install(); begin(); end()",
            4,
            {"done UNSET None 0"},
        ),
        # Set later, and calling ours.
        (
            "install(); ours = signal.getsignal(signal.SIGTERM)\n"
            "signal.signal(signal.SIGTERM, lambda *a: (say('theirs'), ours(*a))); begin(); end()",
            -15,
            {"theirs"} | ALL,
        ),
        # Also where we were taken back, and came again, meanwhile: no circle.
        (
            "install(); ours = signal.getsignal(signal.SIGTERM)\n"
            "signal.signal(signal.SIGTERM, lambda *a: (say('theirs'), ours(*a))); begin()\n"
            "TERMINATION.uninstall(); install(); end()",
            -15,
            {"theirs"} | ALL,
        ),
        # Set later, and not calling ours: it alone decides, also where the main thread is in C.
        (
            "install(); begin(); signal.signal(signal.SIGTERM, lambda *a: say('theirs')); soon(end, 0.2)\n"
            "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**6); time.sleep(1); say('alive')",
            0,
            {"theirs", "alive"} | CLOSED,
        ),
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); install(); begin(); end(); say('alive')",
            0,
            {"alive"} | CLOSED,
        ),
        # Another thread can't set handlers.
        ("t = threading.Thread(target=install); t.start(); t.join(); begin(); end()", -15, set()),
        ("install(); begin(); TERMINATION.uninstall(); end()", -15, set()),
    ],
)
def test_a_handler_that_was_there_runs_and_one_that_is_set_later_decides(code, status, expected):
    done, lines, _ = run(code)
    assert (done.returncode, lines - {"done UNSET None 0"}) == (status, expected - {"done UNSET None 0"}), done.stderr
    assert not done.stderr


def test_a_handler_that_raises_unwinds_as_without_us():
    code = """
def leave(*args):
    sys.exit(3)
signal.signal(signal.SIGTERM, leave); install(); begin()
try:
    end()
except SystemExit as error:
    RECORDER.end(RECORDER.current, error)
    raise
"""
    done, lines, _ = run(code)
    assert done.returncode == 3
    assert "megatron.p2p.send_forward ERROR SystemExit 1" in lines


def test_a_lock_that_the_interrupted_code_holds_and_our_thread_needs_costs_no_span():
    done, lines, took = run("install(); begin(); time.sleep(0.1)\nwith RECORDER._draining: end()")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert not done.stderr
    assert lines == ALL
    assert took < 10


@pytest.mark.parametrize(
    ("bound", "code"),
    [
        (1.5, "end()"),
        (1.5, "soon(end, 0.1); stuck()"),
        # A second one doesn't wait.
        (20, "soon(end, 1); end()"),
        (20, "soon(end, 0.1); soon(end, 1); soon(end, 2); stuck()"),
        # At exit, it doesn't wait anew.
        (1.5, "soon(end, 0.5); sys.exit()"),
    ],
)
def test_the_wait_for_an_exporter_that_hangs_has_a_bound(bound, code):
    done, _, took = run(
        "install(); begin(); time.sleep(0.1); exporter.hangs = True\n"
        f"RECORDER._connection.exit_timeout_s = {bound}\n" + code
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert bound == 20 or done.stderr.count("SIGTERM ended this rank; ") == 1
    assert 1 < took < 5


def test_a_signal_to_a_forked_child_ends_the_child_alone_and_it_exports_nothing():
    code = """
install(); begin()
numbers = list(signals.ENDING)
numbers.remove(signal.SIGINT)  # it raises there
for wait in [0] * 50 + [0.1]:
    child = os.fork()
    if child == 0:
        time.sleep(10)
        os._exit(0)
    time.sleep(wait)
    number = numbers.pop()
    numbers.insert(0, number)
    os.kill(child, number)
    started = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    assert time.monotonic() - started < 5  # it would wait for 10
say("alive")
"""
    done, lines, _ = run(code)
    assert done.returncode == 0, done.stderr
    assert lines == {"alive"} | CLOSED
    assert done.stdout.count("megatron.train") == 1


def test_uninstall_leaves_the_handler_the_wakeup_file_the_thread_and_the_sockets_as_they_were():
    code = """
def state():
    time.sleep(0.2)
    with open("/proc/self/status") as status:
        caught = [line for line in status if line.startswith("SigCgt")]
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    handlers = [signal.getsignal(number) for number in signals.ENDING]
    return handlers, fd, caught, threading.active_count(), len(os.listdir("/proc/self/fd"))

theirs = lambda: signal.signal(signal.SIGTERM, say)
for prepare in (lambda: None, lambda: faulthandler.register(signal.SIGTERM), theirs):
    prepare()
    before = state()
    for _ in range(3):
        install()
        assert state() != before
        TERMINATION.uninstall()
        deadline = time.monotonic() + 20
        while (after := state()) != before and time.monotonic() < deadline:
            pass  # our thread is still ending
        assert after == before, (before, after)
"""
    done, _, _ = run(code)
    assert done.returncode == 0, done.stderr


def test_a_second_interrupt_ends_the_wait_at_exit():
    done, _, took = run(
        "begin(); exporter.hangs = True\n"
        "soon(lambda: os.kill(os.getpid(), signal.SIGINT), 0.5); raise KeyboardInterrupt"
    )
    assert done.returncode == -signal.SIGINT
    assert took < 5
    assert done.stderr.count("Traceback") == 1  # the first


def test_reinforcement_learnings_own_exit_runs_ours_first():
    code = """
from megatron_autoinstrument.targets import rl_utils
def rl_inference_interface_shutdown():
    os._exit(0)
hook = rl_utils.SEAMS[0].hook(rl_inference_interface_shutdown, RECORDER)
leave = os._exit
hook.end(hook.begin((), {}), None, None)
assert os._exit is leave  # before core 0.17 it returns
begin()
hook.begin((), {})
rl_inference_interface_shutdown()
"""
    done, lines, _ = run(code)
    assert done.returncode == 0, done.stderr
    assert lines == CLOSED


def test_an_event_loop_that_was_there_before_goes_on_getting_its_signals():
    code = """
async def main():
    got = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, got.set)
    install()
    begin()
    end(signal.SIGUSR2)
    await asyncio.wait_for(got.wait(), 20)
    TERMINATION.uninstall()
    got.clear()
    end(signal.SIGUSR2)
    await asyncio.wait_for(got.wait(), 20)
    print("both came")
asyncio.run(main())
"""
    done, _, _ = run(code)
    assert done.returncode == 0, done.stderr
    assert "both came" in done.stdout


def test_a_signal_that_the_system_ignores_in_the_first_process_of_a_container_ends_nothing():
    if subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode:
        pytest.skip("no process namespace can be made here")
    code = START + "install(); begin(); end(signal.SIGHUP); say(os.getpid()); RECORDER.flush(); say('training goes on')"
    done = subprocess.run(["unshare", "-pf", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "training goes on" in done.stdout.splitlines()
    assert "ERROR" not in done.stdout
