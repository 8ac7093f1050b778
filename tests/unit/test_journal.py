import mmap
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_autoinstrument.recording import journal
from megatron_autoinstrument.recording.journal import ERROR, HEADER, NO_PARENT, NONE, RING_SLOTS, SLOT, Journal, Kind

DOC = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
TRACE, SPAN, PARENT = b"trace-of-a-step!", b"span-id.", b"parent.."
LAYER, RECEIVE = (
    Kind("megatron.layer.forward"),
    Kind("megatron.p2p.recv_forward", "dl.microbatch_id", None, (("x", True),)),
)


@pytest.fixture
def book():
    return Journal(mmap.mmap(-1, journal.size()))


def contents(book):
    return journal.read(bytes(book._memory))


def test_what_is_written_is_read_back(book):
    what = journal.what(book.kind(RECEIVE), thread=7, flags=ERROR)
    number = book.begin(what, TRACE, SPAN, PARENT, 5, b"l" * 24, 3)
    assert contents(book).slots[0].end == 0
    book.end(number)
    book.describe(2, 4, 1, "run-7")
    book.step(17)
    header, kinds, (slot,) = contents(book)
    assert (header["rank"], header["world_size"], header["run"], header["run_id"]) == (2, 4, 1, "run-7")
    assert (header["iteration"], header["pid"], header["written"]) == (17, os.getpid(), 1)
    assert header["wall_clock"] > header["monotonic"] > slot.end > slot.begin > 0
    assert kinds[slot.kind] == RECEIVE
    assert slot._replace(begin=1, end=2) == (0, ERROR, 7, 1, 2, 5, TRACE, SPAN, PARENT, b"l" * 24, 3, NONE, 1)
    assert book.read(number) == slot


def test_a_kind_is_written_once_and_there_are_not_too_many(book):
    assert [book.kind(LAYER), book.kind(RECEIVE), book.kind(LAYER)] == [0, 1, 0]
    big = Kind("x" * (journal.KINDS_BYTES - 200))
    assert book.kind(big) == 2
    with pytest.raises(ValueError, match="no place in the journal"):
        book.kind(Kind("y" * 200))
    assert contents(book).kinds == [LAYER, RECEIVE, big]


def test_the_ring_keeps_the_latest_and_counts_what_is_overwritten(book):
    what = journal.what(book.kind(LAYER))
    open_one = book.begin(what, TRACE, SPAN, NO_PARENT, 0)
    assert list(book.take()) == [open_one]
    for _ in range(RING_SLOTS + 9):
        book.end(book.begin(what, TRACE, SPAN, PARENT, 0))
    taken = list(book.take())
    assert taken == list(range(open_one + 10, open_one + 10 + RING_SLOTS))
    assert book.dropped == 9
    assert [slot.number for slot in contents(book).slots] == taken
    book.end(open_one)  # its slot is another's by now
    assert book.dropped == 10
    assert book.read(open_one).number > open_one
    assert all(slot.end for slot in contents(book).slots)


def test_what_may_run_long_is_never_overwritten(book):
    what = journal.what(book.kind(LAYER))
    run = book.keep(what, TRACE, SPAN, NO_PARENT, 0)
    for _ in range(RING_SLOTS * 2):
        book.begin(what, TRACE, b"another.", SPAN, 0)
    first = contents(book).slots[0]
    assert (first.span_id, first.end) == (SPAN, 0)
    book.end_kept(run)
    assert book.read(run).end > 0
    book.free(run)
    assert SPAN not in [slot.span_id for slot in contents(book).slots]
    places = [book.keep(what, TRACE, SPAN, NO_PARENT, 0) for _ in range(journal.KEPT_SLOTS + 1)]
    assert len(set(places)) == len(places)
    assert places[-1] == 0
    assert book.dropped == 1


def test_threads_write_at_once(book):
    what = journal.what(book.kind(LAYER))

    def write(name):
        for _ in range(1000):
            book.end(book.begin(what, TRACE, name, NO_PARENT, 0))

    threads = [threading.Thread(target=write, args=(bytes([number]) * 8,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots = contents(book).slots
    assert sorted(slot.number for slot in slots) == list(range(1, 4001))
    assert all(slot.end >= slot.begin for slot in slots)
    assert len([slot for slot in slots if slot.span_id == b"\1" * 8]) == 1000


KILLED = """
import os, signal
from megatron_autoinstrument.recording.journal import *
book = create()
run, layer = what(book.kind(Kind("megatron.pretrain"))), what(book.kind(Kind("megatron.layer.forward")))
book.keep(run, b"t" * 16, b"run-span", NO_PARENT, 10**9)
for _ in range(3):
    book.end(book.begin(layer, b"t" * 16, b"closed..", b"run-span", 10**9))
book.begin(layer, b"t" * 16, b"open....", b"run-span", 10**9)
print(book.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed():
    """The journal of a process that was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = Path(done.stdout.strip())
    yield path
    path.unlink(missing_ok=True)


def test_the_script_of_the_documentation_reads_the_journal_of_a_process_that_was_killed(killed):
    script = re.search(r"```python\n(.*?)```", DOC, re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", script, killed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    run, *layers, last = found
    assert run[1:] == ["open", "megatron.pretrain", b"run-span".hex(), "00" * 8]
    assert [layer[2:] for layer in layers] == [["megatron.layer.forward", b"closed..".hex(), b"run-span".hex()]] * 3
    assert all(int(layer[1]) >= 0 for layer in layers)
    assert last[1:] == ["open", "megatron.layer.forward", b"open....".hex(), b"run-span".hex()]
    assert stat.S_IMODE(killed.stat().st_mode) == 0o600
    assert len(killed.read_bytes()) == journal.size()


def test_those_of_dead_processes_are_removed_and_no_others(killed, tmp_path):
    book = journal.create()
    try:
        assert not killed.exists()
        assert Path(book.path).exists()
        other = tmp_path / "megatron-autoinstrument-notes.txt"
        other.touch()
        journal.remove_stale(str(tmp_path))
        assert other.exists()
        assert (
            Path(book.path).name
            == f"megatron-autoinstrument-{os.getpid()}-{contents(book).header['process_start']}.journal"
        )
    finally:
        path = Path(book.path)
        book.remove()
    assert not path.exists()
    book.remove()


def test_where_no_file_can_be_it_is_in_memory_alone(monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level("INFO", "megatron_autoinstrument"):
        book = journal.create()
    assert book.path is None
    assert "No file can be shared" in caplog.text
    book.end(book.begin(journal.what(book.kind(LAYER)), TRACE, SPAN, PARENT, 0))
    assert len(contents(book).slots) == 1
    left = [
        name for folder in ("/dev/shm", "/tmp") for name in os.listdir(folder) if f"instrument-{os.getpid()}-" in name
    ]
    assert left == []


@pytest.mark.parametrize("data", [b"", b"MGTRNJNL", bytes(journal.size()), b"MGTRNJNL\2\0\0\0" + bytes(journal.size())])
def test_what_is_no_journal_is_refused(data):
    with pytest.raises(ValueError, match="no journal"):
        journal.read(data)


def test_the_documentation_names_every_field_in_its_order():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOC, re.MULTILINE)
    assert rows == [*HEADER.items(), *SLOT.items()]
    for name, value in journal.read(bytes(Journal(mmap.mmap(-1, journal.size()))._memory)).header.items():
        stated = re.search(rf"^\| `{name}` .*?: (\d+)(?: \||,)", DOC, re.MULTILINE)
        if name in ("slot_bytes", "kinds_at", "kept_at", "ring_at", "kept_slots", "ring_slots", "version"):
            assert int(stated[1]) == value, name
    assert f"{round(journal.size() / 1024)} KiB" in DOC
