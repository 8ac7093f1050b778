"""For people: run a training command with a local receiver and show one of its steps, and where the time went."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_autoinstrument.common.semconv import COMBINED, SPAN_GROUPS
from megatron_autoinstrument.tools.receiver import ReceivedSpan, Receiver

# What the time of a step went to, by span: a label and the character of its bar. Where spans of the table nest, the
# outer one is counted.
_KINDS = {
    "megatron.microbatch.forward": ("forward", "█"),
    "megatron.microbatch.backward": ("backward", "▓"),
    "megatron.p2p.recv_forward": ("P2P, with its waits", "░"),
    "megatron.p2p.send_forward": ("P2P, with its waits", "░"),
    "megatron.p2p.recv_backward": ("P2P, with its waits", "░"),
    "megatron.p2p.send_backward": ("P2P, with its waits", "░"),
    "megatron.pp.recv_forward.linked": ("P2P, with its waits", "░"),
    "megatron.grad_sync.start": ("gradient sync", "▒"),
    "megatron.grad_sync.finish": ("gradient sync", "▒"),
    "megatron.optimizer_step": ("optimizer", "▚"),
}
_TOO_FINE = {"layer", "activation_offload", "data_loading"}  # groups: several spans in each microbatch
_NAME_WIDTH = 42


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status, that of the command it ran."""
    parser = argparse.ArgumentParser(prog="megatron-autoinstrument", description=__doc__)
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="run COMMAND, receive its spans here, and show a step of it")
    show.add_argument("--iteration", type=int, help="the iteration to show (default: one in the middle)")
    show.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as: torchrun … train.py …")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or shutil.which(command[0]) is None:
        parser.error(f"no such command: {command[0]}" if command else "which command? Put it after --")

    log = Path(tempfile.mkstemp(prefix="megatron-", suffix=".log")[1])
    print(f"Training; its own output goes to {log}", flush=True)
    with Receiver() as receiver, log.open("wb") as output:
        status = subprocess.run(
            command, env=_environment(receiver.endpoint), stdout=output, stderr=subprocess.STDOUT
        ).returncode
        spans = receiver.spans
    if status != 0:
        print(*log.read_text(errors="replace").splitlines()[-20:], f"It ended with status {status}.", sep="\n")
    print()
    for line in report(spans, options.iteration):
        print(line)
    return status


def _environment(endpoint: str) -> dict[str, str]:
    direct = ",".join(filter(None, [os.environ.get("no_proxy"), os.environ.get("NO_PROXY"), "127.0.0.1"]))
    return {
        "MEGATRON_OTEL_ENABLED": "1",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        **os.environ,
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
        "no_proxy": direct,  # gRPC would ask a proxy even for this machine
        "NO_PROXY": direct,
    }


def report(spans: list[ReceivedSpan], iteration: int | None = None) -> Iterator[str]:
    """The lines that show `spans`: one iteration on every rank, and where the time of all of them went."""
    if not spans:
        yield "Nothing was recorded. Is MEGATRON_OTEL_ENABLED=1 set, and does the rank that exports get to train?"
        return
    by_rank: dict[int, list[ReceivedSpan]] = defaultdict(list)
    for span in spans:
        by_rank[span.resource.get("dl.rank", 0)].append(span)
    steps = [span for span in spans if span.name == "megatron.train_step"]
    known = sorted({span.attributes["megatron.iteration"] for span in steps})
    yield f"{len(spans)} spans from {_count(len(by_rank), 'rank')}, {_count(len(known), 'training iteration')}."
    if not steps:
        yield from _summary(by_rank)
        yield ""
        yield "For the steps themselves set MEGATRON_OTEL_SPAN_GROUPS=per_step, or =all."
        return
    shown = known[len(known) // 2] if iteration is None or iteration not in known else iteration
    yield from _timeline([step for step in steps if step.attributes["megatron.iteration"] == shown], shown)
    yield from _breakdown(steps, known)
    yield ""
    yield "A P2P span includes its waits: for the neighbour, and on a GPU by default for all that the stage has queued."
    yield "The rest includes Megatron's own barriers."
    yield "To send the same spans to your own backend, set OTEL_EXPORTER_OTLP_ENDPOINT and leave this command out."


def _timeline(steps: list[ReceivedSpan], iteration: int) -> Iterator[str]:
    start, end = min(step.start for step in steps), max(step.end for step in steps)
    width = min(max(shutil.get_terminal_size((110, 24)).columns - _NAME_WIDTH - 10, 30), 100)

    def bar(span: ReceivedSpan) -> str:
        left = round((span.start - start) * width / (end - start))
        right = max(round((span.end - start) * width / (end - start)), left + 1)
        return " " * left + _KINDS.get(span.name, ("", "─"))[1] * (right - left)

    yield f"Iteration {iteration} as it ran, all ranks on one time axis of {(end - start) / 1e6:.1f} ms:"
    for step in sorted(steps, key=lambda step: step.resource.get("dl.rank", 0)):
        yield ""
        yield f"{'rank ' + str(step.resource.get('dl.rank', 0)):<{_NAME_WIDTH}} {'ms':>7}"
        for depth, label, span in _rows(step, 0):
            name = "  " * depth + label
            yield f"{name:<{_NAME_WIDTH}} {span.duration_ms:7.1f}  {bar(span)}"


def _rows(span: ReceivedSpan, depth: int) -> Iterator[tuple[int, str, ReceivedSpan]]:
    if SPAN_GROUPS.get(span.name) in _TOO_FINE:
        return
    label = span.name.removeprefix("megatron.")
    if (microbatch := span.attributes.get("megatron.microbatch_id")) is not None:
        label += f" {microbatch}"
    if span.attributes.get(COMBINED):
        calls = [other.name for other in _siblings(span) if other.start == span.start]
        if span.name != calls[0]:
            return  # one call, one row
        label = " + ".join([label, *(name.removeprefix("megatron.p2p.") for name in calls[1:])])
    yield depth, label, span
    for child in span.children:
        yield from _rows(child, depth + 1)


def _siblings(span: ReceivedSpan) -> list[ReceivedSpan]:
    return span.parent.children if span.parent is not None else [span]


def _breakdown(steps: list[ReceivedSpan], known: list[int]) -> Iterator[str]:
    later = [step for step in steps if len(known) == 1 or step.attributes["megatron.iteration"] != known[0]]
    ranks = sorted({step.resource.get("dl.rank", 0) for step in later})
    totals: dict[str, dict[int, float]] = {label: defaultdict(float) for label, _ in _KINDS.values()}
    totals["the rest"] = defaultdict(float)
    for step in later:
        rank, spent = step.resource.get("dl.rank", 0), 0.0
        for label, milliseconds in _spent(step):
            totals[label][rank] += milliseconds
            spent += milliseconds
        totals["the rest"][rank] += step.duration_ms - spent
    whole = {rank: sum(total[rank] for total in totals.values()) for rank in ranks}
    count = {rank: sum(step.resource.get("dl.rank", 0) == rank for step in later) for rank in ranks}
    characters = dict(_KINDS.values())
    yield ""
    yield f"Where the time of a step went{', without the first' if len(known) > 1 else ''}:"
    yield " " * 24 + "".join(f"{'rank ' + str(rank):>20}" for rank in ranks[:4])
    for label, total in totals.items():
        cells = (f"{total[rank] / count[rank]:9.1f} ms {total[rank] / whole[rank]:6.0%}" for rank in ranks[:4])
        yield f"{characters.get(label, ' ')} {label:<22}" + "".join(f"{cell:>20}" for cell in cells)
    if len(ranks) > 4:
        yield f"  and {len(ranks) - 4} more ranks"


def _spent(span: ReceivedSpan) -> Iterator[tuple[str, float]]:
    if span.name in _KINDS:
        if not span.attributes.get(COMBINED) or next(o for o in _siblings(span) if o.start == span.start) is span:
            yield _KINDS[span.name][0], span.duration_ms
        return
    for child in span.children:
        yield from _spent(child)


def _summary(by_rank: dict[int, list[ReceivedSpan]]) -> Iterator[str]:
    """What was recorded, each name once per place in the tree."""

    def lines(spans: Iterable[ReceivedSpan], depth: int) -> Iterator[str]:
        named: dict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in spans:
            named[span.name].append(span)
        for name, same in named.items():
            label = "  " * depth + name.removeprefix("megatron.") + (f" ×{len(same)}" if len(same) > 1 else "")
            yield f"{label:<{_NAME_WIDTH}} {sum(span.duration_ms for span in same):10.1f} ms"
            yield from lines((child for span in same for child in span.children), depth + 1)

    for rank, spans in sorted(by_rank.items()):
        yield ""
        yield f"rank {rank}"
        yield from lines((span for span in spans if span.parent is None), 0)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


if __name__ == "__main__":
    sys.exit(main())
