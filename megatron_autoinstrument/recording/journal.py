"""What a rank records: a file in shared memory, with a slot of fixed size for each call, written where that is made.

It outlives the process, however that ends. docs/journal.md describes the format, which is all that a reader needs.
Nothing here knows of OpenTelemetry, and no secret, no path and no text of an error is in the file.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from struct import Struct
from time import monotonic_ns, time_ns
from typing import Any, NamedTuple

from megatron_autoinstrument.redact import get_logger

_logger = get_logger(__name__)

MAGIC = b"MGTRNJNL"
VERSION = 1

# Name and format of each field, in their order; all are little-endian, and none has padding.
HEADER = {
    "magic": "8s",
    "version": "I",
    "slot_bytes": "I",
    "kinds_at": "I",
    "kept_at": "I",
    "ring_at": "I",
    "kept_slots": "I",
    "ring_slots": "I",
    "rank": "i",
    "world_size": "i",
    "run": "I",
    "pid": "Q",
    "process_start": "Q",
    "kinds_bytes": "Q",
    "written": "Q",
    "iteration": "q",
    "monotonic": "q",
    "wall_clock": "q",
    "run_id": "64s",
}
SLOT = {
    "kind": "H",
    "flags": "H",
    "thread": "I",
    "begin": "q",
    "end": "q",
    "offset": "q",
    "trace_id": "16s",
    "span_id": "8s",
    "parent_id": "8s",
    "link": "24s",
    "first": "q",
    "second": "q",
    "number": "Q",
}
NONE = -(2**63)
"""Stands in `first` or `second` where the call has no such number."""
NO_LINK, NO_PARENT = bytes(24), bytes(8)
ERROR = 1
"""The flag of a call that raised."""

HEADER_BYTES, KINDS_BYTES = 4096, 12 * 1024
KEPT_SLOTS, RING_SLOTS = 64, 8192  # the ring's number is a power of two: 900 kB in all

PREFIX = "megatron-autoinstrument-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)\.journal")


def _offsets(fields: Mapping[str, str]) -> dict[str, int]:
    formats = list(fields.values())
    return {name: Struct("<" + "".join(formats[:index])).size for index, name in enumerate(fields)}


_HEADER, _SLOT = (Struct("<" + "".join(fields.values())) for fields in (HEADER, SLOT))
_AT, _IN_SLOT = _offsets(HEADER), _offsets(SLOT)
SLOT_BYTES = _SLOT.size
# What a call begins with: kind, flags and thread are one number, which is worked out once.
_BEGIN = Struct("<Q" + "".join(list(SLOT.values())[3:]))


class Slot(NamedTuple):
    """One call, by the names of `SLOT`."""

    kind: int
    flags: int
    thread: int
    begin: int
    end: int
    offset: int
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    link: bytes
    first: int
    second: int
    number: int


class Kind(NamedTuple):
    """What many calls have in common, written once."""

    name: str
    first: str | None = None
    """What the number `first` of a slot is called."""
    second: str | None = None
    constant: tuple[tuple[str, Any], ...] = ()
    """Attributes with the same value in each of these calls."""


class Journal:
    """The file of this process. Any thread may begin and end calls; another may take what has ended meanwhile."""

    def __init__(self, memory: mmap.mmap, path: str | None = None) -> None:
        """
        Args:
            memory: Zeroes, of `size()` bytes.
            path: Of the file that is mapped; None where there is none.
        """
        self.path = path
        self.dropped = 0
        """Calls that were overwritten, or for which there was no place."""
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._kinds: dict[Kind, int] = {}
        self._kept = list(range(KEPT_SLOTS))  # those that are free
        self._taken = 0
        header = [MAGIC, VERSION, SLOT_BYTES, HEADER_BYTES, _KEPT_AT, _RING_AT, KEPT_SLOTS, RING_SLOTS, 0, 1, 0]
        header += [os.getpid(), _process_start("self"), 0, 0, 0, monotonic_ns(), time_ns(), b""]
        _HEADER.pack_into(memory, 0, *header)
        self.begin, self.end = _ring(memory, self._words, self._count_dropped)

    begin: Callable[..., int]
    """Writes that a call begins, and returns its number.

    Args:
        what: The result of `what`.
        trace_id: 16 bytes.
        span_id: 8 bytes.
        parent_id: 8 bytes, `NO_PARENT` where it is none's child.
        offset: From the monotonic clock to the wall clock, in ns.
        link: Trace id and span id of another call.
        first: A number of it, by the name that its kind gives it.
        second: Another one.
    """
    end: Callable[[int], None]
    """Writes that the call of this number has ended."""

    def _count_dropped(self) -> None:
        self.dropped += 1

    def kind(self, kind: Kind) -> int:
        """The number that stands for `kind` in a slot.

        Raises:
            ValueError: there is no place for another.
        """
        number = self._kinds.get(kind)
        if number is None:
            number = len(self._kinds)
            line = json.dumps([kind.name, kind.first, kind.second, dict(kind.constant)]).encode() + b"\n"
            used = self._words[_AT["kinds_bytes"] // 8]
            if used + len(line) > KINDS_BYTES:
                raise ValueError(f"There is no place in the journal for another kind: {kind.name}")
            self._memory[HEADER_BYTES + used : HEADER_BYTES + used + len(line)] = line
            self._words[_AT["kinds_bytes"] // 8] = used + len(line)  # last: a reader takes no half of a line
            self._kinds[kind] = number
        return number

    def describe(self, rank: int, world_size: int, run: int, run_id: str) -> None:
        """Says which rank of which run this is."""
        for name, value in (("rank", rank), ("world_size", world_size), ("run", run)):
            Struct("<" + HEADER[name]).pack_into(self._memory, _AT[name], value)
        Struct("<64s").pack_into(self._memory, _AT["run_id"], run_id.encode()[:64])

    def step(self, iteration: int) -> None:
        """Says which iteration is running, and what time it is on both clocks."""
        at = _AT["iteration"] // 8
        self._words[at], self._words[at + 1], self._words[at + 2] = iteration, monotonic_ns(), time_ns()

    def keep(
        self, what: int, trace_id: bytes, span_id: bytes, parent_id: bytes, offset: int, link: bytes = NO_LINK
    ) -> int:
        """Like `begin`, for a call that may run long: it has its place until it is given back by `free`.

        Returns:
            A negative number, or 0 where there is no place.
        """
        if not self._kept:
            self.dropped += 1
            return 0
        index = self._kept.pop()
        at = _KEPT_AT + index * SLOT_BYTES
        fields = (what, monotonic_ns(), 0, offset, trace_id, span_id, parent_id, link, NONE, NONE, index + 1)
        _BEGIN.pack_into(self._memory, at, *fields)
        return -1 - index

    def end_kept(self, number: int) -> None:
        """Like `end`, for a call that `keep` has given its number."""
        self._words[(_at(number) + _IN_SLOT["end"]) // 8] = monotonic_ns()

    def read(self, number: int) -> Slot:
        """What stands in the place of the call of that number. It is that call if it has this number itself; a smaller
        one is still on its way out, and a larger one has overwritten it."""
        return Slot._make(_SLOT.unpack_from(self._memory, _at(number)))

    def free(self, number: int) -> None:
        """Gives the place of a kept call back."""
        self._words[(_at(number) + _IN_SLOT["number"]) // 8] = 0
        self._kept.append(-1 - number)

    def take(self) -> Iterator[int]:
        """The numbers of the calls that have begun since the last time, kept ones excepted. What was overwritten
        before it could be taken is counted."""
        while True:
            number = self._taken + 1
            found = self._words[(_at(number) + _IN_SLOT["number"]) // 8]
            if found < number:
                return
            if found > number:
                lost = max(1, self._words[_AT["written"] // 8] - RING_SLOTS - self._taken)
                self.dropped += lost
                self._taken += lost
            else:
                self._taken = number
                yield number

    def remove(self) -> None:
        """Removes the file. What is mapped stays until the process ends."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)
            self.path = None


_KEPT_AT = HEADER_BYTES + KINDS_BYTES
_RING_AT = _KEPT_AT + KEPT_SLOTS * SLOT_BYTES


def size() -> int:
    """Of a journal, in bytes."""
    return _RING_AT + RING_SLOTS * SLOT_BYTES


def _at(number: int) -> int:
    if number < 0:
        return _KEPT_AT + (-1 - number) * SLOT_BYTES
    return _RING_AT + (number & (RING_SLOTS - 1)) * SLOT_BYTES


def _ring(
    memory: mmap.mmap, words: memoryview, count_dropped: Callable[[], None]
) -> tuple[Callable[..., int], Callable[[int], None]]:
    """The hot path: functions that find all they need in their closures."""
    pack_into, start, slot, mask, now = _BEGIN.pack_into, _RING_AT, SLOT_BYTES, RING_SLOTS - 1, monotonic_ns
    written_at = _AT["written"] // 8
    end_at, number_at = ((_RING_AT + _IN_SLOT[name]) // 8 for name in ("end", "number"))
    slot_words = SLOT_BYTES // 8
    numbers = count(1)  # several threads draw from it

    def begin(
        what: int,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        offset: int,
        link: bytes = NO_LINK,
        first: int = NONE,
        second: int = NONE,
    ) -> int:
        number = next(numbers)
        words[written_at] = number  # before the slot: a reader then knows that what stood there is on its way out
        at = start + (number & mask) * slot
        pack_into(memory, at, what, now(), 0, offset, trace_id, span_id, parent_id, link, first, second, number)
        return number

    def end(number: int) -> None:
        at = (number & mask) * slot_words
        if words[number_at + at] == number:
            words[end_at + at] = now()
        else:
            count_dropped()

    return begin, end


def create() -> Journal:
    """The journal of this process: in shared memory, else in the folder for temporary files, else in memory that nobody
    else can read. Those of processes that are dead, and of this user, are removed from there."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        path = os.path.join(folder, f"{PREFIX}{os.getpid()}-{_process_start('self')}.journal")
        try:
            remove_stale(folder)
            # The ranks' own shared memory, of data workers and of NCCL, is in this file system too.
            room = os.statvfs(folder)
            if room.f_bavail * room.f_frsize < 64 * size():
                continue
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
        try:
            os.posix_fallocate(file, 0, size())  # now: to write where there is no room would kill the process later
            return Journal(mmap.mmap(file, size()), path)
        except OSError:
            os.unlink(path)
        finally:
            os.close(file)
    _logger.info("No file can be shared: what a rank was doing when it was killed can't be known.")
    return Journal(mmap.mmap(-1, size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def remove_stale(folder: str) -> None:
    """Removes the journals of dead processes that this user may remove.

    Raises:
        OSError: there is no such folder, or it can't be read.
    """
    for name in os.listdir(folder):
        if (found := _NAME.fullmatch(name)) and _process_start(found[1]) != int(found[2]):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _process_start(pid: str) -> int:
    """When the process began, in clock ticks since the machine did: with its number that names it for good. 0 where
    there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


class Contents(NamedTuple):
    """What a journal holds."""

    header: dict[str, Any]
    kinds: list[Kind]
    slots: list[Slot]
    """By their begin: what is still there, whether it has ended or not."""


def read(data: bytes) -> Contents:
    """The contents of a journal's file.

    Raises:
        ValueError: it is none, or of another version.
    """
    header = dict(zip(HEADER, _HEADER.unpack_from(data), strict=True)) if len(data) >= _HEADER.size else {}
    if header.get("magic") != MAGIC or header["version"] != VERSION or len(data) < size():
        raise ValueError("This is no journal of version 1.")
    header["run_id"] = header["run_id"].rstrip(b"\0").decode(errors="replace")
    lines = data[HEADER_BYTES : HEADER_BYTES + header["kinds_bytes"]].splitlines()
    kinds = [
        Kind(name, first, second, tuple(constant.items())) for name, first, second, constant in map(json.loads, lines)
    ]
    kept = [slot for slot in _slots(data, _KEPT_AT, KEPT_SLOTS) if slot.number]
    ring = [slot for slot in _slots(data, _RING_AT, RING_SLOTS) if slot.number > max(0, header["written"] - RING_SLOTS)]
    return Contents(header, kinds, sorted(kept + ring, key=lambda slot: slot.begin))


def _slots(data: bytes, at: int, number: int) -> Iterator[Slot]:
    return map(Slot._make, _SLOT.iter_unpack(data[at : at + number * SLOT_BYTES]))


def what(kind: int, thread: int = 0, flags: int = 0) -> int:
    """The beginning of a slot as one number."""
    return kind | flags << 16 | thread << 32
