"""Trains while the instrumentation is switched off and on: between steps by a signal, a thread and `paused()`, then at
any time by all three. Prints as JSON which functions of ours ran in each step. With CONTROL set it switches nothing."""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time

import calls_of_ours
import pretrain_tiny_gpt
from megatron.training import get_args, training

RANK, CONTROL = int(os.environ["RANK"]), os.environ.get("CONTROL")
RANDOM_AFTER, RANDOM_UNTIL = 14, 40  # iterations
decide = training.checkpoint_and_decide_exit
pause = contextlib.ExitStack()
switching = None
replaced = {}


def by_signal(number):
    os.kill(os.getpid(), number)


def by_thread(switch):
    thread = threading.Thread(target=switch)
    thread.start()
    thread.join()


def any_of_them(draw):
    switch = draw.choice([megatron.uninstrument, megatron.instrument, None])
    if switch is not None:
        switch()
    else:
        with megatron.paused():
            time.sleep(draw.random() * 0.01)


def at_any_time():
    draw = random.Random(RANK)

    def alarm(number, frame):
        draw.choice([megatron.uninstrument, megatron.instrument])()
        if switching is not None:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.05))

    def run():
        mine = random.Random(2 + RANK)
        while switching is not None:
            time.sleep(mine.random() * 0.05)
            any_of_them(mine)

    global switching
    switching = threading.Thread(target=run)
    switching.start()
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def no_more():
    global switching
    thread, switching = switching, None  # first: the handler starts the timer again
    signal.setitimer(signal.ITIMER_REAL, 0)
    thread.join()
    megatron.instrument()  # in case it is off


AFTER = {}  # a step: what to do
if not CONTROL:
    from megatron_autoinstrument import MegatronInstrumentor, instrumentor

    megatron = MegatronInstrumentor()
    signal.signal(signal.SIGUSR1, lambda number, frame: megatron.uninstrument())
    signal.signal(signal.SIGUSR2, lambda number, frame: megatron.instrument())
    AFTER = {
        2: lambda: by_signal(signal.SIGUSR1),
        4: lambda: by_signal(signal.SIGUSR2),
        6: lambda: by_thread(megatron.uninstrument),
        8: lambda: by_thread(megatron.instrument),
        10: lambda: pause.enter_context(megatron.paused()),
        12: pause.close,
        RANDOM_AFTER: at_any_time,
        RANDOM_UNTIL: no_more,
    }


def between_steps(*args, **kwargs):
    calls_of_ours.count(None)
    finished = get_args().curr_iteration + 1
    AFTER.get(finished, bool)()
    if finished < RANDOM_AFTER:
        replaced[finished + 1] = 0 if CONTROL else len(instrumentor.PATCHER._replacements)
        calls_of_ours.count(finished + 1)
    return decide(*args, **kwargs)


training.checkpoint_and_decide_exit = between_steps
if not CONTROL:
    megatron.instrument()
pretrain_tiny_gpt.main()
calls_of_ours.count(None)
# In one piece: print() lets another rank's line come between.
found = {
    "rank": RANK,
    "calls": calls_of_ours.COUNTS,
    "replaced": replaced,
    "open": None if CONTROL else instrumentor.RECORDER.current is not None,
    "imported": sorted(name for name in sys.modules if name.startswith("megatron_autoinstrument")),
}
os.write(1, f"\nPROCESS STATE {json.dumps(found)}\n".encode())
