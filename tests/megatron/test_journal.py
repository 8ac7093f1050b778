"""What a rank leaves behind that dies without a word, read back by the script of docs/journal.md."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from harness import INSTRUMENT, ROOT, SCRIPTS, train

SCRIPT = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "journal.md").read_text(), re.DOTALL)[1]
OPTIONS = ("--eval-interval", "100")
LINE = re.compile(r"^\d+ (\d+|open) (\S+) ([0-9a-f]{16}) [0-9a-f]{16}$", re.MULTILINE)


@pytest.fixture
def bounded_memory():
    """A control group that the kernel kills in, where there may be one."""
    group = Path(f"/sys/fs/cgroup/memory/megatron-autoinstrument-{secrets.token_hex(4)}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError:
        pytest.skip("no control group of memory can be made here")
    yield group
    with contextlib.suppress(OSError):
        group.rmdir()


def killed(tmp_path, dies, ranks=1, options=()):
    """Of each rank: what it has noted, and what its journal says, as (what, span's name, span's id)."""
    notes, kept = tmp_path / "notes", f"/dev/shm/kept-{secrets.token_hex(4)}-"
    environment = {"MEGATRON_OTEL_SPAN_GROUPS": "all", "MEGATRON_OTEL_RANK_STRATEGY": "all_ranks"}
    run = train(
        *OPTIONS,
        *options,
        ranks=ranks,
        way=INSTRUMENT,
        script=SCRIPTS / "dying.py",
        environment={**environment, "DIES": str(dies), "NOTES": str(notes), "KEPT": kept},
    )
    noted = defaultdict(set)
    for line in notes.read_text().splitlines():
        rank, *what = line.split()
        noted[int(rank)].add(tuple(what))
    return run, noted, [_read(Path(f"{kept}{rank}")) for rank in range(ranks)]


def _read(journal):
    told = subprocess.check_output([sys.executable, "-c", SCRIPT, journal], text=True)
    journal.unlink()
    return {("open" if length == "open" else "ended", name, span) for length, name, span in LINE.findall(told)}


def test_a_rank_that_crashes_and_one_that_is_killed_leave_every_span(tmp_path):
    run, noted, read = killed(tmp_path, "SIGSEGV", 2, ("--pipeline-model-parallel-size", "2"))
    assert run.status == -signal.SIGSEGV
    names = {name for what, name, _ in noted[0] if what == "open"}
    assert {
        "megatron.train",
        "megatron.train_step",
        "megatron.forward_backward",
        "megatron.microbatch.forward",
    } <= names
    for rank in 0, 1:  # the second is killed once the first is dead
        assert len(noted[rank]) > 100
        assert noted[rank] <= read[rank]
    assert {one for one in noted[0] if one[0] == "open"} == {one for one in read[0] if one[0] == "open"}


def test_a_rank_that_is_killed_for_memory_leaves_every_span(tmp_path, bounded_memory):
    run, noted, read = killed(tmp_path, bounded_memory)
    assert run.status == -signal.SIGKILL
    assert len(noted[0]) > 100
    assert noted[0] <= read[0]
    assert {one for one in noted[0] if one[0] == "open"} == {one for one in read[0] if one[0] == "open"}
    assert os.path.isdir(bounded_memory)
