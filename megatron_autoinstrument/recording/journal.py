"""What a rank records: a file in shared memory, with a slot of fixed size for each call, written where that is made.

It outlives the process, however that ends. docs/journal.md describes the format, which is all that a reader needs.
Nothing here knows of OpenTelemetry, and no secret, no path and no text of an error is in the file.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from struct import Struct, error
from time import monotonic_ns, time_ns
from typing import Any, NamedTuple, Protocol

from megatron_autoinstrument.common.redact import get_logger

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
    "span_id": "Q",
    "parent_id": "Q",
    "first": "q",
    "second": "q",
    "number": "Q",
    "link_trace_id": "16s",
    "link_span_id": "Q",
}
NO_TRACE = bytes(16)
ERROR, LINKED = 1, 2
"""Flags: the call raised; it is linked to another."""

HEADER_BYTES, KINDS_BYTES = 4096, 12 * 1024
KEPT_SLOTS, RING_SLOTS = 128, 8192  # the ring's number is a power of two: 900 kB in all

PREFIX = "megatron-autoinstrument-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-(\d+)\.journal")


def _offsets(fields: Mapping[str, str]) -> dict[str, int]:
    formats = list(fields.values())
    return {name: Struct("<" + "".join(formats[:index])).size for index, name in enumerate(fields)}


_HEADER, _SLOT = (Struct("<" + "".join(fields.values())) for fields in (HEADER, SLOT))
_AT, _IN_SLOT = _offsets(HEADER), _offsets(SLOT)
SLOT_BYTES = _SLOT.size
# What a call begins with: kind, flags and thread are one number, which is worked out once.
_pack_into = Struct("<Qq8xq16sQQqqQ").pack_into
_pack_link_into = Struct("<16sQ").pack_into
pack_plain_into = Struct("<Qq8xq16sQQ16xQ").pack_into  # of a call that has no numbers
# Calls that are being written may be so many: as many threads do so at once.
AT_ONCE = 16


class Slot(NamedTuple):
    """One call, by the names of `SLOT`."""

    kind: int
    flags: int
    thread: int
    begin: int
    end: int
    offset: int
    trace_id: bytes
    span_id: int
    parent_id: int
    first: int
    second: int
    number: int
    link_trace_id: bytes
    link_span_id: int


class Call(Protocol):
    """What the journal asks of a call."""

    name: str
    attributes: Mapping[str, Any] | None
    begun: int
    """When, by the monotonic clock."""
    offset: int
    """From there to the wall clock, in ns."""
    trace: bytes | None
    """16 bytes; None: not known."""
    span_id: int
    """0: not known."""


class Kind(NamedTuple):
    """What many calls have in common, written once."""

    name: str
    first: str | None = None
    """What the number `first` of a slot is called."""
    second: str | None = None
    constant: tuple[tuple[str, Any], ...] = ()
    """Attributes with the same value in each of these calls."""


def _line(kind: Kind) -> bytes:
    return json.dumps([kind.name, kind.first, kind.second, dict(kind.constant)]).encode() + b"\n"


OTHER = Kind("other")
"""Kind 0: of calls for whose kind there was no place."""


class Journal:
    """The file of this process. Any thread may begin and end calls."""

    def __init__(self, memory: mmap.mmap, path: str | None = None) -> None:
        """
        Args:
            memory: Zeroes, of `size()` bytes.
            path: Of the file that is mapped; None where there is none.
        """
        self.path = path
        self._pid = os.getpid()
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        """What is in the memory, in words of 8 bytes."""
        self._kinds: dict[Kind, int] = {}
        self._order: list[Kind] = []
        self._free = deque(range(KEPT_SLOTS))  # kept slots, the one that ended first before the others
        self._shapes = _Shapes(self.kind)
        header = [MAGIC, VERSION, SLOT_BYTES, HEADER_BYTES, _KEPT_AT, RING_AT, KEPT_SLOTS, RING_SLOTS, 0, 1, 0]
        header += [os.getpid(), _process_start("self"), 0, 0, monotonic_ns(), time_ns(), b""]
        _HEADER.pack_into(memory, 0, *header)
        self.kind(OTHER)
        self.numbers = count(1)
        """Of the calls in the ring; several threads draw from it."""
        self.latest = 0
        """The latest of them."""
        self.plain: dict[str, int] = {}
        """Of calls without attributes that have been written: the number of their kind by their name."""

    def begin(self, call: Call, parent_id: int, thread: int) -> int:
        """Writes that a call begins, and returns its number.

        Args:
            call: The call. Numbers and truths of its attributes are written.
            parent_id: 0: it is nobody's child.
            thread: 0: the training thread.
        """
        self.latest = number = next(self.numbers)
        self.write(RING_AT + (number & MASK) * SLOT_BYTES, number, call, parent_id, thread)
        return number

    def write(self, at: int, number: int, call: Call, parent_id: int, thread: int = 0) -> None:
        """Writes into the slot at this place of the memory that the call of this number begins."""
        name, attributes = call.name, call.attributes
        if not attributes and name in self.plain:
            what, first, second = self.plain[name], 0, 0
        else:
            what, first, second = self._shapes.of(name, attributes)
            if not attributes:
                self.plain[name] = what
        if thread:
            what |= (thread & 0xFFFF_FFFF) << 32
        begun, offset, trace, span_id = call.begun, call.offset, call.trace or NO_TRACE, call.span_id
        try:
            _pack_into(self.memory, at, what, begun, offset, trace, span_id, parent_id, first, second, number)
        except error:  # a number that has no place
            ids, numbers = (trace, span_id, parent_id), (_number(first), _number(second))
            _pack_into(self.memory, at, what, begun, offset, *ids, *numbers, number)

    def end(self, number: int, ended: int) -> None:
        """Writes that the call of this number ended at this time, by the monotonic clock."""
        if self.latest - number < SURE:  # else it is overwritten
            self.words[FIRST_END + (number & MASK) * SLOT_WORDS] = ended

    def kind(self, kind: Kind) -> int:
        """The number that stands for `kind` in a slot; 0 where there is no place for another."""
        number = self._kinds.get(kind)
        if number is None:
            # Other threads, and signal handlers, may be here at once: each writes the same table, one kind perhaps
            # twice, and nobody's line is at another's place.
            self._order.append(kind)
            number, written = self._order.index(kind), 0
            while written != len(self._order):
                lines = [_line(one) for one in list(self._order)]
                written, table = len(lines), b"".join(lines)
                while len(table) > KINDS_BYTES:
                    table = table[: -len(lines.pop())]
                self.memory[HEADER_BYTES : HEADER_BYTES + len(table)] = table
                self.words[_AT["kinds_bytes"] // 8] = len(table)  # last: a reader takes no half of a line
            if number >= len(lines):
                number = 0
            self._kinds[kind] = number
        return number

    def describe(self, rank: int, world_size: int, run: int, run_id: str) -> None:
        """Says which rank of which run this is."""
        for name, value in (("rank", rank), ("world_size", world_size), ("run", run)):
            Struct("<I").pack_into(self.memory, _AT[name], value & 0xFFFF_FFFF)
        Struct("<64s").pack_into(self.memory, _AT["run_id"], run_id.encode(errors="replace")[:64])

    def step(self, iteration: int) -> None:
        """Says which iteration is running, and what time it is on both clocks."""
        at = _AT["iteration"] // 8
        self.words[at], self.words[at + 1], self.words[at + 2] = _number(iteration), monotonic_ns(), time_ns()

    def keep(self, call: Call, parent_id: int) -> int:
        """Like `begin`, for a call that may run long: nothing takes its place while it runs.

        Returns:
            A negative number, or 0 where there is no place.
        """
        try:
            index = self._free.popleft()
        except IndexError:
            return 0
        self.write(_KEPT_AT + index * SLOT_BYTES, index + 1, call, parent_id)
        return -1 - index

    def end_kept(self, number: int, ended: int) -> None:
        """Like `end`, for a call that `keep` has given its number. It can be read until its place is needed."""
        words, at = self.words, _KEPT_END - number * SLOT_WORDS
        if words[at] == 0:  # else it has been ended already
            words[at] = ended
            self._free.append(-1 - number)

    def end_all(self, ended: int) -> None:
        """Ends what a run has left open that was aborted at any point."""
        for number in (*range(-KEPT_SLOTS, 0), *range(RING_SLOTS)):
            at = _at(number) // 8
            if self.words[at + _IN_SLOT["number"] // 8] and not self.words[at + _IN_SLOT["end"] // 8]:
                self.words[at + _IN_SLOT["end"] // 8] = ended
        self._free = deque(range(KEPT_SLOTS))

    def link(self, number: int, trace_id: bytes, span_id: int) -> None:
        """Writes what the call of that number is linked to."""
        if self._has(number):
            _pack_link_into(self.memory, _at(number) + _IN_SLOT["link_trace_id"], trace_id, span_id)
            self._flag(number, LINKED)

    def fail(self, number: int) -> None:
        """Writes that the call of that number has raised."""
        if self._has(number):
            self._flag(number, ERROR)

    def _flag(self, number: int, flag: int) -> None:
        self.memory[_at(number) + _IN_SLOT["flags"]] |= flag

    def _has(self, number: int) -> bool:
        """Whether the place of the call of that number is its own still."""
        found: int = self.words[(_at(number) + _IN_SLOT["number"]) // 8]
        return found == (number if number > 0 else -number) != 0

    def remove(self) -> None:
        """Removes the file, if this is its process. What is mapped stays until the process ends."""
        if self.path is not None and os.getpid() == self._pid:
            with suppress(OSError):
                os.unlink(self.path)
            self.path = None


_KEPT_AT = HEADER_BYTES + KINDS_BYTES
RING_AT = _KEPT_AT + KEPT_SLOTS * SLOT_BYTES
# Of the call `number`: the place is RING_AT + (number & MASK) * SLOT_BYTES, and among the words, that of its end is
# FIRST_END + (number & MASK) * SLOT_WORDS. It is still its own if less than SURE have begun since.
MASK, SURE = RING_SLOTS - 1, RING_SLOTS - AT_ONCE
FIRST_END, SLOT_WORDS = (RING_AT + _IN_SLOT["end"]) // 8, SLOT_BYTES // 8
_KEPT_END = (_KEPT_AT + _IN_SLOT["end"]) // 8 - SLOT_WORDS  # kept slots have the numbers from 1 on, and -1 on outside


def size() -> int:
    """Of a journal, in bytes."""
    return RING_AT + RING_SLOTS * SLOT_BYTES


def _at(number: int) -> int:
    if number < 0:
        return _KEPT_AT + (-1 - number) * SLOT_BYTES
    return RING_AT + (number & MASK) * SLOT_BYTES


_Shape = tuple[int, "str | None", "str | None", tuple[tuple[str, bool], ...]]
"""Of the first call with certain attributes: the number of its kind, the names of its two numbers, and attributes that
are the same in all of that kind. (A named tuple takes much longer to read.)"""


class _Shapes:
    """Of calls by their name and attributes: how a slot begins, and the call's two numbers."""

    def __init__(self, number_of: Callable[[Kind], int]) -> None:
        self._number_of = number_of
        self._known: dict[tuple[str, ...], _Shape] = {}

    def of(self, name: str, attributes: Mapping[str, Any] | None) -> tuple[int, Any, Any]:
        """The number of its kind, and its numbers: ints of any size; 0 where it has none."""
        if not attributes:
            attributes = _NONE
        key = (name, *attributes)
        try:
            kind, first, second, constant = self._known[key]
        except KeyError:
            kind, first, second, constant = self._known[key] = self._shape(name, attributes)
        for at, value in constant:
            if attributes[at] is not value:
                kind, first, second, constant = self._shape(name, attributes)
                break
        one: Any
        two: Any
        if first is None or type(one := attributes[first]) is not int:
            one = 0
        if second is None or type(two := attributes[second]) is not int:
            two = 0
        return kind, one, two

    def _shape(self, name: str, attributes: Mapping[str, Any]) -> _Shape:
        first, second = (*(key for key, value in attributes.items() if _is_number(value)), None, None)[:2]
        constant = tuple((key, value) for key, value in attributes.items() if type(value) is bool)
        return self._number_of(Kind(name, first, second, constant)), first, second, constant


_NONE: Mapping[str, Any] = {}


def _is_number(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST


def _number(value: Any) -> int:
    return value if _is_number(value) else 0


_MOST = 1 << 63


def create() -> Journal:
    """The journal of this process: in shared memory, else in the folder for temporary files where that is in memory
    too, else in memory that nobody else can read. Those of processes that are dead, and of this user, are removed from
    there."""
    shared: Callable[[], str] = lambda: "/dev/shm"  # noqa: E731
    for find in (shared, tempfile.gettempdir):
        try:
            folder = find()
            # The ranks' own shared memory, of data workers and of NCCL, is in this file system too; in a container it
            # has 64 MiB by default.
            room = os.statvfs(folder)
            if not _is_in_memory(folder) or room.f_bavail * room.f_frsize < 16 * size():
                continue
            remove_stale(folder)
            return _create_in(folder)
        except Exception:
            _logger.debug("There can be no journal in a folder", exc_info=True)
    _logger.info("No file can be shared: what a rank was doing when it was killed can't be known.")
    return Journal(mmap.mmap(-1, size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _create_in(folder: str) -> Journal:
    path = os.path.join(folder, f"{PREFIX}{_namespace()}-{os.getpid()}-{_process_start('self')}.journal")
    with suppress(FileNotFoundError):
        os.unlink(path)  # of this very process, before it called `exec`
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size())  # now: to write where there is no room would kill the process later
        journal = Journal(mmap.mmap(file, size()), path)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    atexit.register(journal.remove)
    return journal


def _is_in_memory(folder: str) -> bool:
    """Whether what is written there costs no disk's time: a training thread that writes to a page which is on its way
    to a disk may have to wait."""
    path = os.path.realpath(folder)
    with open("/proc/self/mounts", errors="surrogateescape") as file:
        mounts = [line.split(" ")[1:3] for line in file]
    around = [mount for mount in mounts if os.path.commonpath((path, mount[0])) == mount[0]]
    # The latest of several at one place is on top.
    return max(reversed(around), key=lambda mount: len(mount[0]), default=["", ""])[1] == "tmpfs"


def remove_stale(folder: str) -> None:
    """Removes the journals of dead processes that this user may remove, of this container alone: processes of others
    can't be seen, also where their memory is shared.

    Raises:
        OSError: there is no such folder, or it can't be read.
    """
    for name in os.listdir(folder):
        found = _NAME.fullmatch(name)
        if found and int(found[1]) == _namespace() and _process_start(found[2]) != int(found[3]):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _namespace() -> int:
    """The number of the namespace that process ids are of; 0 where there is none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


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
    ring = list(_slots(data, RING_AT, RING_SLOTS))
    oldest = max(0, max(slot.number for slot in ring) - RING_SLOTS + AT_ONCE)  # what is older may be half overwritten
    ring = [slot for slot in ring if slot.number > oldest]
    return Contents(header, kinds, sorted(kept + ring, key=lambda slot: slot.begin))


def _slots(data: bytes, at: int, number: int) -> Iterator[Slot]:
    return map(Slot._make, _SLOT.iter_unpack(data[at : at + number * SLOT_BYTES]))
