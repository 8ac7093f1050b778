"""How a run may end, and what is recorded of it then. Each end comes in the middle of the fourth iteration."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
from harness import EVERYTHING, INSTRUMENT, PLAIN, SCRIPTS, train

PIPELINE = ("--pipeline-model-parallel-size", "2")

# What encloses the point where it ends, from the outside in.
RUN = ("megatron.pretrain", "megatron.train")
FORWARD = (*RUN, "megatron.train_step", "megatron.forward_backward", "megatron.microbatch.forward")
BOTH_WAYS = (*FORWARD[:-1], "megatron.p2p.send_forward", "megatron.p2p.recv_backward")


@dataclass(frozen=True)
class End:
    """What is expected, by rank where there are several.

    Attributes:
        end: What the script is to do; see scripts/ending.py.
        codes: Of the processes that ended otherwise than with 0, as torchrun tells them.
        cut: The spans that were running, and whose call did not return.
        error: What is said to have ended them: nothing, where that is no error.
        raised: The innermost of them carries the exception.
        finished: The steps that were finished.
        compared: Whether an uninstrumented run is to end with the same codes.
    """

    end: str
    options: tuple[str, ...] = ()
    status: int = 1
    codes: tuple[int, ...] = ()
    cut: tuple[tuple[str, ...], ...] = (FORWARD,)
    error: tuple[str | None, ...] = (None,)
    raised: bool = False
    finished: int = 3
    ranks: int = 1
    compared: bool = False


ENDS = {
    "exit interval": End("", ("--exit-interval", "4"), 0, cut=(RUN,), finished=4),
    "exit duration": End("duration", ("--exit-duration-in-mins", "1"), 0, cut=(RUN,), finished=4),
    "exit with an error": End("exit", codes=(1,), cut=(RUN,), error=("SystemExit",), raised=True, finished=4),
    "SIGTERM": End("SIGTERM", codes=(-15,), error=("SIGTERM",), compared=True),
    "SIGTERM, exit handler": End("SIGTERM", ("--exit-signal-handler",), 0, cut=(RUN,), finished=4, compared=True),
    "SIGTERM, training's handler": End("SIGTERM", ("--exit-signal-handler-for-training",), 0, compared=True),
    "SIGINT": End("SIGINT", codes=(-2,), error=("KeyboardInterrupt",), raised=True, compared=True),
    "os._exit of RL": End("rl", status=0, cut=(RUN,), finished=4),
    "torchrun after a crash": End(
        "sleep@0,raise@1",
        codes=(-15, 1),
        cut=(FORWARD, FORWARD),
        error=("SIGTERM", "RuntimeError"),
        raised=True,
        ranks=2,
        compared=True,
    ),
    # Rank 0 waits for rank 1, in C++. torchrun passes the signal on.
    **{
        f"{signal} to torchrun": End(
            f"{signal}-launcher@1", PIPELINE, cut=(BOTH_WAYS, FORWARD), error=(signal, signal), ranks=2
        )
        for signal in ("SIGTERM", "SIGHUP")
    },
}
ends = pytest.mark.parametrize("name", ENDS)


@cache
def run_of(name, way=INSTRUMENT):
    end = ENDS[name]
    environment = {**(EVERYTHING if way == INSTRUMENT else {"MEGATRON_OTEL_ENABLED": "0"}), "END": end.end}
    script = SCRIPTS / "ending.py"
    return train(*end.options, ranks=end.ranks, torchrun=(), way=way, script=script, environment=environment)


def codes(run):
    return tuple(sorted(int(code) for code in re.findall(r"exitcode *: (-?\d+) ", run.output)))


@ends
def test_the_exit_code_is_megatrons(name):
    end, run = ENDS[name], run_of(name)
    assert (run.status, codes(run)) == (end.status, end.codes), run.output[-3000:]
    if end.compared:
        plain = run_of(name, PLAIN)
        assert (plain.status, codes(plain)) == (end.status, end.codes), plain.output[-3000:]


@ends
def test_what_was_running_ends_and_says_what_ended_it(name):
    end, run = ENDS[name], run_of(name)
    assert len(run.ranks) == end.ranks
    for rank, cut, error in zip(run.ranks, end.cut, end.error, strict=True):
        found = {span.name: span for span in run.of(rank)}  # the last of each name
        for span in (found[name] for name in cut):
            assert span.status == ("ERROR" if error else "UNSET"), span
            assert span.attributes.get("error.type") == error
        assert Counter(span.name for span in run.of(rank) if span.status == "ERROR") == Counter(cut if error else ())
        events = [(span.name, event) for span in run.of(rank) for event, _ in span.events]
        assert events == ([(cut[-1], "exception")] if end.raised and error and not error.startswith("SIG") else [])


@ends
def test_all_that_was_recorded_arrives(name):
    end, run = ENDS[name], run_of(name)
    data_parallel = end.ranks if end.options != PIPELINE else 1
    for rank in run.ranks:
        counts = run.counts(rank)
        steps = [span.attributes["megatron.iteration"] for span in run.of(rank) if span.name == "megatron.train_step"]
        assert steps == [1, 2, 3, 4]
        assert counts["megatron.microbatch.backward"] == 4 // data_parallel * end.finished
        assert counts["megatron.optimizer_step"] == end.finished
        assert all(span.end >= span.start for span in run.of(rank))


def test_nothing_is_said_of_an_end_that_lost_nothing():
    for name in ENDS:
        assert not [line for line in run_of(name).ours() if "File " not in line]


def test_a_rank_that_is_killed_is_told_apart_from_the_one_that_takes_its_place():
    run = train(
        *PIPELINE,
        torchrun=("--max-restarts", "1"),
        script=SCRIPTS / "ending.py",
        environment={
            **EVERYTHING,
            "END": "SIGKILL@1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else gloo finds the first attempt's addresses
        },
    )
    assert run.status == 0, run.output[-3000:]
    assert "-9" in re.findall(r"exitcode: (-?\d+)", run.output)
    attempts = {}
    for span in run.spans:
        attempts.setdefault((span.resource["dl.rank"], span.resource["process.pid"]), []).append(span)
    # Rank 0 of the first attempt was waiting for the one that was killed, which could export nothing any more.
    first = next(of for (rank, _), of in attempts.items() if rank == 0)
    second = {rank: of for (rank, _), of in attempts.items() if of is not first}
    assert sorted(rank for rank, _ in attempts) in ([0, 0, 1], [0, 0, 1, 1])
    assert next(span for span in first if span.name == "megatron.train").status == "ERROR"
    for rank in (0, 1):
        whole = second[rank]
        assert Counter(span.name for span in whole)["megatron.train_step"] == 6
        assert not [span for span in whole if span.status == "ERROR"]
        assert {span.trace_id for span in whole}.isdisjoint({span.trace_id for span in first})
    ids = [span.span_id for span in run.spans]
    assert len(set(ids)) == len(ids)
    for _, pid in attempts:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
