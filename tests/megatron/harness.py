"""Runs real Megatron on this machine's CPU, with a real OTLP/gRPC receiver, as a user would launch it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_autoinstrument.tools.receiver import ReceivedLog, ReceivedPoint, ReceivedSpan, Receiver

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
OLDEST_OTEL = Path(sys.prefix) / "otel-oldest"

PLAIN, INSTRUMENT, PTH = "plain", "opentelemetry-instrument", "pth"
EVERYTHING = {"MEGATRON_OTEL_SPAN_GROUPS": "all", "MEGATRON_OTEL_RANK_STRATEGY": "all_ranks"}

_TIMEOUT_S = 240

# `make test-all` sweeps through every value of a kind, `make test` takes one or two that stand for it.
SWEEP = os.environ.get("SWEEP") == "all"

# The Megatron that the tests are about: the one installed, or that in this folder.
MEGATRON = Path(os.environ["TEST_MEGATRON"]) if os.environ.get("TEST_MEGATRON") else None


def _messages() -> re.Pattern[str]:
    """What a line of this package's log looks like: its logger's name, or the beginning of any of its messages."""
    sources = "".join(path.read_text() for path in (ROOT / "megatron_autoinstrument").rglob("*.py"))
    messages = re.findall(r'_logger\.(?:warning|info)\(\s*"([^"]+)"', sources)
    assert len(messages) > 8
    parts = {max(re.split(r"%\w", message), key=len) for message in messages}
    return re.compile("|".join(["megatron_autoinstrument", *map(re.escape, parts)]))


_OURS = _messages()


@dataclass
class Run:
    """A finished run."""

    status: int
    output: str
    spans: list[ReceivedSpan]
    points: list[ReceivedPoint]
    logs: list[ReceivedLog]
    requests: dict[str, list[Any]]
    """As they came, by signal."""

    @property
    def losses(self) -> list[tuple[str, ...]]:
        """What was printed of losses and gradients: iteration, loss and norm, or where and validation loss."""
        return re.findall(r" iteration +(\d+)/.*? lm loss: (\S+) .*? grad norm: (\S+) ", self.output) + re.findall(
            r"validation loss at (.*?) \| lm loss value: (\S+) ", self.output
        )

    @property
    def ranks(self) -> list[int]:
        return sorted({span.resource["dl.rank"] for span in self.spans})

    def of(self, rank: int) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.resource["dl.rank"] == rank]

    def counts(self, rank: int) -> Counter[str]:
        return Counter(span.name for span in self.of(rank))

    def ours(self) -> list[str]:
        """The lines that this package logged. Before Megatron sets logging up they come without a name."""
        return [line for line in self.output.splitlines() if _OURS.search(line)]


def train(
    *options: str,
    ranks: int = 2,
    torchrun: Sequence[str] | None = None,
    way: str = INSTRUMENT,
    script: Path = FIXTURES / "pretrain_tiny_gpt.py",
    environment: Mapping[str, str] = EVERYTHING,
    otel: Path | None = None,
    megatron: Path | None = MEGATRON,
    first: Path | None = None,
    python: Path = Path(sys.executable),
    folder: str | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Run:
    """Trains the tiny GPT.

    Args:
        options: Megatron's, after those of fixtures/tiny_gpt.args.
        torchrun: More options of its; None: each rank is started by itself, as srun does, which takes seconds less.
        way: PLAIN, INSTRUMENT (the wrapper command) or PTH (the variable alone).
        script: The training script.
        environment: Variables to set.
        otel: A folder with another OpenTelemetry, to be preferred.
        megatron: A folder with another Megatron, likewise.
        first: A folder to be preferred to both.
        python: Of another environment.
        folder: The current one of the ranks.
    """
    tiny = (FIXTURES / "tiny_gpt.args").read_text().split()
    rank = [script, *tiny, *options]
    command = [python, *rank]
    if torchrun is not None:
        command = [BIN / "torchrun", "--nproc-per-node", str(ranks), *torchrun, *rank]
    if way == INSTRUMENT:
        command = [python, (otel / "bin" if otel else BIN) / "opentelemetry-instrument", *command]
    places = [{}] if torchrun is not None else _places(ranks)
    base = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "MEGATRON_", "NEMO_"))}
    with Receiver() as receiver:
        status, output = _run(
            command,
            {
                **base,
                "PYTHONPATH": os.pathsep.join(str(path) for path in (first, otel, megatron, FIXTURES) if path),
                "TORCHDYNAMO_DISABLE": "1",
                "OMP_NUM_THREADS": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "no_proxy": "127.0.0.1",
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "OTEL_METRICS_EXPORTER": "none",
                "OTEL_LOGS_EXPORTER": "none",
                **({"MEGATRON_OTEL_ENABLED": "1"} if way == PTH else {}),
                **environment,
            },
            places,
            folder,
            timeout_s,
        )
        requests = {signal: receiver._requests(signal) for signal in ("spans", "metrics", "logs")}
        return Run(status, output, receiver.spans, receiver.points, receiver.logs, requests)


def _places(ranks: int) -> list[dict[str, str]]:
    """The variables that tell each of so many ranks its place."""
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    return [
        {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(ranks)
    ]


def _free_port() -> int:
    """Of those that the kernel gives to nobody by itself: one of its own might be a client's before rank 0 has it."""
    while True:
        port = secrets.choice(range(15_000, 30_000))
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _run(
    command: Sequence[object],
    environment: Mapping[str, str],
    places: Sequence[Mapping[str, str]],
    folder: str | None,
    timeout_s: float,
) -> tuple[int, str]:
    """Runs `command` once for each of `places`, as long as none fails: the status, and what all of them print."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        processes = [
            subprocess.Popen(
                [str(word) for word in command],
                env={**environment, **place},
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for place in places
        ]
        try:
            while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{timeout_s} s are over")
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return next((status for status in statuses if status), 0), output.read()


@cache
def plain_losses(*options: str, ranks: int = 2) -> list[tuple[str, ...]]:
    """What the same run prints without this package."""
    run = train(*options, ranks=ranks, way=PLAIN, environment={"MEGATRON_OTEL_ENABLED": "0"})
    assert run.status == 0, run.output[-3000:]
    assert not run.spans
    return run.losses
