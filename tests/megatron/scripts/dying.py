"""Trains the tiny GPT, until rank 0 dies in the middle of the fourth iteration: by a signal, or for memory.

It notes in the file NOTES which spans have ended, and which are open when it dies, and keeps the journal under KEPT and
the rank: what runs next on the machine removes those of dead processes.
"""

import ctypes
import os
import signal
from pathlib import Path

from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.recorder import Recorder

notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
end, end_call = Recorder.end, Recorder.end_call


def note(what, record):
    os.write(notes, f"{os.environ['RANK']} {what} {record.name} {record.span_id:016x}\n".encode())


def end_noting(recorder, record, *args, **kwargs):
    end(recorder, record, *args, **kwargs)
    if record.span_id:
        note("ended", record)


def end_call_noting(recorder, record, result, error):
    end_noting(recorder, record, error)


# Before Megatron is imported: its hooks keep what they are given.
Recorder.end, Recorder.end_call = end_noting, end_call_noting

import pretrain_tiny_gpt  # noqa: E402
from megatron.training import get_args  # noqa: E402

forward_step, calls = pretrain_tiny_gpt.forward_step, 0


def die():
    record = RECORDER.current
    while record is not None:
        note("open", record)
        record = record.parent
    how = os.environ["DIES"]
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    group = Path(how)  # a control group whose memory is bounded
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taken = [bytearray(10 << 20) for _ in range(1000)]
    raise SystemExit(f"{len(taken)} pieces of memory, and still alive")


def forward_step_and_die(data_iterator, model):
    global calls
    calls += 1
    if calls == 1:
        (journal,) = Path("/dev/shm").glob(f"megatron-autoinstrument-*-{os.getpid()}-*.journal")
        os.link(journal, os.environ["KEPT"] + os.environ["RANK"])
    if calls == 14 and get_args().rank == 0:  # the second of four microbatches
        die()
    return forward_step(data_iterator, model)


pretrain_tiny_gpt.forward_step = forward_step_and_die
pretrain_tiny_gpt.main()
