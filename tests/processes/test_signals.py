"""What SIGTERM does to a process of ours. Each runs in one of its own: the signal ends it."""

import signal
import subprocess
import sys
import time

import pytest

START = """
import asyncio, atexit, faulthandler, functools, hashlib, os, signal, sys, threading, time
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from megatron_autoinstrument import instrumentor, sdk, signals
from megatron_autoinstrument.signals import TERMINATION
from megatron_autoinstrument.spans import FREQUENT, LIVE, RECORDER

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Exporter(SpanExporter):
    hangs = False
    def export(self, spans):
        if self.hangs:
            time.sleep(60)
        for span in spans:
            say(span.name, span.status.status_code.name, span.attributes.get("error.type"), len(span.events))
        return SpanExportResult.SUCCESS

exporter, provider = Exporter(), TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(BatchSpanProcessor(exporter))
RECORDER.connect_by(lambda: sdk.connect({"traces": provider}, None, {}))

def install():
    signals.install(functools.partial(RECORDER.cut_off, "SIGTERM"), RECORDER.hand_on)

def begin():
    RECORDER.begin("megatron.train", LIVE)
    RECORDER.end(RECORDER.begin("done", FREQUENT))
    RECORDER.begin_together(["megatron.p2p.send_forward", "megatron.p2p.recv_backward"], {})

def end():
    os.kill(os.getpid(), signal.SIGTERM)

def stuck():  # in C, which a signal doesn't interrupt
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def soon(call, seconds=0.5):
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()

say("AT", time.monotonic())
"""
ALL = {
    "done UNSET None 0",
    "megatron.train ERROR SIGTERM 0",
    "megatron.p2p.send_forward ERROR SIGTERM 0",
    "megatron.p2p.recv_backward ERROR SIGTERM 0",
}
CLOSED = {line.replace("ERROR SIGTERM", "UNSET None") for line in ALL}


def run(code):
    """What the process did and printed, and how long it took without its imports."""
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=50)
    ended = time.monotonic()  # of one clock in all processes
    start, *lines = done.stdout.splitlines()
    return done, set(lines), ended - float(start.removeprefix("AT "))


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


@pytest.mark.parametrize(
    ("bound", "code"),
    [
        (1.5, "end()"),
        (1.5, "soon(end, 0.1); stuck()"),
        # A lock that the interrupted code holds and our thread needs.
        (1.5, "exporter.hangs = False\nwith RECORDER._draining: end()"),
        # A second one doesn't wait.
        (20, "soon(end, 1); end()"),
        (20, "soon(end, 0.1); soon(end, 1); stuck()"),
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
for wait in [0] * 50 + [0.1]:
    child = os.fork()
    if child == 0:
        time.sleep(10)
        os._exit(0)
    time.sleep(wait)
    os.kill(child, signal.SIGTERM)
    started = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
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
    return signal.getsignal(signal.SIGTERM), fd, caught, threading.active_count(), len(os.listdir("/proc/self/fd"))

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
hook = rl_utils.SEAMS[0].hook(rl_inference_interface_shutdown, frozenset())
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
