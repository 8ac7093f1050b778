import io
import mmap
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import pytest

from megatron_autoinstrument.recording import journal
from megatron_autoinstrument.recording.journal import (
    AT_ONCE,
    ERROR,
    HEADER,
    LINKED,
    NO_TRACE,
    OTHER,
    RING_SLOTS,
    SLOT,
    Journal,
    Kind,
)

DOC = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
TRACE, SPAN, PARENT = b"trace-of-a-step!", 2**64 - 7, 5


def call(name="megatron.layer.forward", attributes=None, begun=1, offset=5, trace=TRACE, span_id=SPAN):
    return types.SimpleNamespace(**locals())


RECEIVE = ("megatron.p2p.recv_forward", {"dl.microbatch_id": 3, "x": True, "text": "of somebody's", "big": 1 << 70})


@pytest.fixture
def book():
    return Journal(mmap.mmap(-1, journal.size()))


def contents(book):
    return journal.read(bytes(book.memory))


def test_what_is_written_is_read_back(book):
    number = book.begin(call(*RECEIVE), PARENT, 2**40 + 7)
    assert contents(book).slots[0].end == 0
    book.link(number, b"l" * 16, 9)
    book.fail(number)
    book.end(number, 2)
    book.describe(2, 4, 1, "run-7")
    book.step(17)
    header, kinds, (slot,) = contents(book)
    assert (header["rank"], header["world_size"], header["run"], header["run_id"]) == (2, 4, 1, "run-7")
    assert (header["iteration"], header["pid"]) == (17, os.getpid())
    assert header["wall_clock"] > header["monotonic"] > 0
    assert kinds[slot.kind] == Kind("megatron.p2p.recv_forward", "dl.microbatch_id", None, (("x", True),))
    assert slot == (1, ERROR | LINKED, 7, 1, 2, 5, TRACE, SPAN, PARENT, 3, 0, 1, b"l" * 16, 9)


def test_a_call_of_which_little_is_known_is_written_too(book):
    book.end(book.begin(call(trace=None, span_id=0), 0, 0), 2)
    assert contents(book).slots == [(1, 0, 0, 1, 2, 5, NO_TRACE, 0, 0, 0, 0, 1, NO_TRACE, 0)]


def test_a_kind_is_written_once_and_there_are_not_too_many(book):
    layer, receive = Kind("a"), Kind("b", "c", None, (("d", False),))
    assert [book.kind(layer), book.kind(receive), book.kind(layer)] == [1, 2, 1]
    big = Kind("x" * (journal.KINDS_BYTES - 200))
    assert book.kind(big) == 3
    assert book.kind(Kind("y" * 200)) == 0
    assert contents(book).kinds == [OTHER, layer, receive, big]
    book.begin(call("z" * 200), PARENT, 0)
    assert contents(book).slots[0].kind == 0


def test_the_ring_keeps_the_latest(book):
    open_one = book.begin(call(), 0, 0)
    for at in range(RING_SLOTS + 9):
        book.end(book.begin(call(begun=at + 2), PARENT, 0), at + 3)
    for write in (book.fail, lambda number: book.end(number, 1), lambda number: book.link(number, TRACE, 1)):
        write(open_one)  # its slot is another's by now
    slots = contents(book).slots
    oldest = open_one + 10 + AT_ONCE  # those before may be half overwritten by as many threads
    assert [slot.number for slot in slots] == list(range(oldest, open_one + 10 + RING_SLOTS))
    assert all(slot.end > slot.begin and not slot.flags for slot in slots)


def test_a_link_is_the_calls_that_was_given_it(book):
    book.link(book.begin(call(), PARENT, 0), b"l" * 16, 9)
    for _ in range(RING_SLOTS):
        number = book.begin(call(), PARENT, 0)
    assert book._has(number)
    assert not [slot for slot in contents(book).slots if slot.flags & LINKED]


def test_what_may_run_long_is_not_overwritten_and_can_be_read_until_its_place_is_needed(book):
    run = book.keep(call(*RECEIVE), 0)
    for _ in range(RING_SLOTS * 2):
        book.begin(call(begun=2, span_id=1), SPAN, 0)
    steps = [book.keep(call(), 0) for _ in range(journal.KEPT_SLOTS)]
    assert len({run, *steps}) == len(steps) + 1
    assert steps[-1] == 0
    first = contents(book).slots[0]
    assert (first.span_id, first.end, first.first) == (SPAN, 0, 3)
    book.fail(run)
    book.end_kept(run, 7)
    assert contents(book).slots[0] == first._replace(end=7, flags=ERROR)
    book.end_kept(steps[0], 9)
    assert [book.keep(call(), 0), book.keep(call(), 0)] == [run, steps[0]]


def test_what_a_run_has_left_open_is_over_when_the_next_begins(book):
    for _ in range(journal.KEPT_SLOTS):
        book.keep(call(), 0)
    closed = book.begin(call(), 0, 0)
    book.end(closed, 5)
    book.begin(call(), 0, 0)
    book.end_all(9)
    slots = contents(book).slots
    assert len(slots) == journal.KEPT_SLOTS + 2
    assert sorted({slot.end for slot in slots}) == [5, 9]
    assert book.keep(call(), 0)


@pytest.fixture
def mounts(monkeypatch):
    """Gives the machine these mounts."""

    def give(lines):
        def opened(path, mode="r", **options):
            return io.TextIOWrapper(io.BytesIO(lines), **options) if path == "/proc/self/mounts" else open(path, mode)

        monkeypatch.setattr(journal, "open", opened, raising=False)

    return give


@pytest.mark.parametrize("machine", ["no temporary folder", "mounts in no encoding", "a mount without a source"])
def test_whatever_the_machine_is_like_there_is_a_journal(machine, mounts, monkeypatch):
    def fail():
        raise FileNotFoundError("No usable temporary directory found")

    if machine == "no temporary folder":
        monkeypatch.setattr(tempfile, "gettempdir", fail)
    else:
        mounts(
            (b" /x tmpfs rw 0 0" if "source" in machine else b"\xff /\xff tmpfs rw 0 0") + b"\ntmpfs / tmpfs rw 0 0\n"
        )
    book = journal.create()
    assert book.path is not None
    book.end(book.begin(call(), 0, 0), 2)
    assert len(contents(book).slots) == 1
    book.remove()


def test_of_mounts_at_one_place_the_latest_is_on_top(mounts):
    mounts(b"tmpfs /dev/shm tmpfs rw 0 0\n/dev/sda /dev/shm ext4 rw 0 0\n")
    assert not journal._is_in_memory("/dev/shm")


def test_whatever_a_run_is_called_and_counted_it_is_described(book):
    book.describe(-1, 1 << 40, -1, "caf\udce9" * 40)
    book.step(1 << 70)
    assert contents(book).header["iteration"] == 0


def test_calls_of_new_kinds_that_meet_have_their_own(book):
    """On threads, or in a signal handler inside of another."""

    class Meeting(dict):
        def get(self, kind):
            found = super().get(kind)
            if kind.name == "a" and not self.pop("met", None):
                self["met"] = True
                book.begin(call("b"), 0, 0)
                book.begin(call("a"), 0, 0)
            return found

    book._kinds = Meeting(book._kinds)
    for name in "acb":
        book.begin(call(name), 0, 0)
    _, kinds, slots = contents(book)
    assert sorted(kinds[slot.kind].name for slot in slots) == ["a", "a", "b", "b", "c"]


def test_a_truth_is_that_calls_own(book):
    for truth in (True, False, True):
        book.begin(call("a", {"x": truth}), 0, 0)
    _, kinds, slots = contents(book)
    assert [kinds[slot.kind].constant for slot in slots] == [(("x", True),), (("x", False),), (("x", True),)]


def test_a_call_that_is_ended_twice_gives_its_place_back_once(book):
    run = book.keep(call(), 0)
    book.end_kept(run, 5)
    book.end_kept(run, 6)
    assert contents(book).slots[0].end == 5
    places = [book.keep(call(), 0) for _ in range(journal.KEPT_SLOTS)]
    assert len(set(places)) == len(places)


def test_a_number_that_is_none_that_time_is_written_as_0(book):
    for number in (1, True, 1 << 70, "1"):
        book.begin(call("a", {"x": number}), 0, 0)
    _, kinds, slots = contents(book)
    assert [(kinds[slot.kind].first, slot.first) for slot in slots] == [("x", 1), ("x", 0), ("x", 0), ("x", 0)]


def test_threads_write_at_once(book):
    def write(name):
        for _ in range(1000):
            book.end(book.begin(call(span_id=name), 0, 0), 2)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots = contents(book).slots
    assert sorted(slot.number for slot in slots) == list(range(1, 4001))
    assert all(slot.end >= slot.begin for slot in slots)
    assert len([slot for slot in slots if slot.span_id == 1]) == 1000


KILLED = """
import os, signal, sys
from types import SimpleNamespace
from megatron_autoinstrument.recording import journal
book = journal._create_in(sys.argv[1])
def call(name, begun, span_id):
    return SimpleNamespace(name=name, attributes=None, begun=begun, offset=10**9, trace=b"t" * 16, span_id=span_id)
book.keep(call("megatron.pretrain", 1, 7), 0)
for _ in range(3):
    book.end(book.begin(call("megatron.layer.forward", 2, 8), 7, 0), 5)
book.begin(call("megatron.layer.forward", 6, 9), 7, 0)
print(book.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path):
    """The journal of a process that was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = Path(done.stdout.strip())
    return path


def test_the_script_of_the_documentation_reads_the_journal_of_a_process_that_was_killed(killed):
    script = re.search(r"```python\n(.*?)```", DOC, re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", script, killed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    run, *layers, last = found
    assert run == ["1000000001", "open", "megatron.pretrain", f"{7:016x}", f"{0:016x}"]
    assert layers == [["1000000002", "3", "megatron.layer.forward", f"{8:016x}", f"{7:016x}"]] * 3
    assert last == ["1000000006", "open", "megatron.layer.forward", f"{9:016x}", f"{7:016x}"]
    assert stat.S_IMODE(killed.stat().st_mode) == 0o600
    assert len(killed.read_bytes()) == journal.size()


def test_those_of_dead_processes_are_removed_and_no_others(killed, tmp_path):
    namespace = journal._namespace()
    own = journal._create_in(str(tmp_path))
    others = [
        tmp_path / "megatron-autoinstrument-notes.txt",
        tmp_path / f"megatron-autoinstrument-{namespace + 1}-1-1.journal",  # another container's
        Path(own.path),
    ]
    others[0].touch()
    others[1].touch()
    journal.remove_stale(str(tmp_path))
    assert not killed.exists()
    assert all(other.exists() for other in others)
    start = contents(own).header["process_start"]
    assert Path(own.path).name == f"megatron-autoinstrument-{namespace}-{os.getpid()}-{start}.journal"
    own.remove()
    assert not others[2].exists()
    own.remove()


def test_where_no_file_can_be_it_is_in_memory_alone(monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level("INFO", "megatron_autoinstrument"):
        book = journal.create()
    assert book.path is None
    assert "No file can be shared" in caplog.text
    book.end(book.begin(call(), PARENT, 0), 2)
    assert len(contents(book).slots) == 1
    left = [name for folder in ("/dev/shm", "/tmp") for name in os.listdir(folder) if f"-{os.getpid()}-" in name]
    assert left == []


def test_a_folder_on_a_disk_is_none_of_those(monkeypatch):
    """There a write may wait for the disk."""
    assert not journal._is_in_memory("/proc/self")
    assert journal._is_in_memory("/dev/shm")
    monkeypatch.setattr(journal, "_is_in_memory", lambda folder: False)
    assert journal.create().path is None


@pytest.mark.parametrize("data", [b"", b"MGTRNJNL", bytes(journal.size()), b"MGTRNJNL\2\0\0\0" + bytes(journal.size())])
def test_what_is_no_journal_is_refused(data):
    with pytest.raises(ValueError, match="no journal"):
        journal.read(data)


def test_the_documentation_names_every_field_in_its_order():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOC, re.MULTILINE)
    assert rows == [*HEADER.items(), *SLOT.items()]
    for name, value in journal.read(bytes(Journal(mmap.mmap(-1, journal.size())).memory)).header.items():
        stated = re.search(rf"^\| `{name}` .*?: (\d+)(?: \||,)", DOC, re.MULTILINE)
        if name in ("slot_bytes", "kinds_at", "kept_at", "ring_at", "kept_slots", "ring_slots", "version"):
            assert int(stated[1]) == value, name
    assert f"{round(journal.size() / 1024)} KiB" in DOC
