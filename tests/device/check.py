"""What only a GPU can show of this package, on one GPU, in ten minutes at most: python tests/device/check.py [PART...]

It needs Python with torch for CUDA, megatron-core, grpcio, and OpenTelemetry with its OTLP/gRPC exporter. What lies on
PYTHONPATH is found, and this package is that of the checkout: nothing has to be installed. Its status is 0 where all
parts are well, 1 where one is not, and 3 where there is no GPU: nothing is checked then. With --on-cpu the parts run on
the CPU, with stand-ins for the device: that shows nothing of a GPU, and tries the check itself.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "megatron")]

from harness import EVERYTHING, PLAIN, Run, train  # noqa: E402

LIMIT_S, RUN_S = 540, 150  # of the whole, after which no part begins; of one run
STEPS = 8
OURS = "megatron_autoinstrument/"
# Where Megatron reads the loss to log it, and where a hook reads it right after that: it waits for nothing more.
MEGATRONS_READ, READ_AFTER = " training_log", " _average_loss"
ALIKE = ("--hidden-dropout", "0", "--attention-dropout", "0")  # the device draws other numbers than the CPU
SMALL = (*ALIKE, "--train-iters", str(STEPS), "--eval-interval", "100")
GRAPHS = ("--cuda-graph-impl", "full_iteration", "--optimizer-cuda-graph", "--te-rng-tracker")
WARM_UP = 3  # steps of Megatron's before it captures
LARGER = (
    *("--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--bf16"),
    *("--seq-length", "1024", "--max-position-embeddings", "1024", "--vocab-size", "32000", "--eval-iters", "0"),
)
BLOCKS = 22

on_cpu = False


class Failed(Exception):
    """A check that didn't hold."""


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def trained(*options: str, asked: str, cpu: bool | None = None, more: Mapping[str, str] | None = None) -> Run:
    """A run of one rank; `asked` is for train.py."""
    cpu = on_cpu if cpu is None else cpu
    path = os.environ.get("PYTHONPATH", "")
    run = train(
        *(() if cpu else ("--distributed-backend", "nccl")),
        *options,
        ranks=1,
        way=PLAIN,
        script=Path(__file__).with_name("train.py"),
        first=Path(os.pathsep.join(filter(None, (str(ROOT), path)))),
        environment={
            **EVERYTHING,
            "DEVICE_CHECK": asked,
            **({"CUDA_ON_CPU": "1", "CUDA_VISIBLE_DEVICES": ""} if cpu else {"CUDA_ON_CPU": "0"}),
            **(more or {}),
        },
        timeout_s=RUN_S,
    )
    require(run.status == 0, f"a run ended with status {run.status}:\n{run.output[-3000:]}")
    require(len(run.losses) > 0, f"a run printed no loss:\n{run.output[-3000:]}")
    return run


@cache
def plain() -> Run:
    return trained(*SMALL, asked="syncs")


@cache
def instrumented() -> Run:
    return trained(*SMALL, asked="instrumented,syncs")


def syncs(run: Run) -> Counter[str]:
    """How often the host waited for the device, by the place in the source."""
    return Counter(json.loads(run.output.split("SYNCS ")[-1].splitlines()[0]))


def added(before: Counter[str], after: Counter[str]) -> list[str]:
    """The places where instrumentation makes the host wait that didn't without it, or less often."""
    logged = sum(times for site, times in before.items() if site.endswith(MEGATRONS_READ))
    allowed = Counter({site: logged for site in after if site.startswith(OURS) and site.endswith(READ_AFTER)})
    return [f"{site} ({times} times)" for site, times in sorted((after - before - allowed).items())]


def steps() -> str:
    """Losses are those of the plain run, and no place of the host waits for the device that didn't."""
    require(plain().losses == instrumented().losses, f"losses: {plain().losses} became {instrumented().losses}")
    before, after = syncs(plain()), syncs(instrumented())
    require(before.total() > 0, "the debug mode saw no wait at all, though Megatron reads the loss")
    more = added(before, after)
    require(not more, "waits for the device: " + "; ".join(more))
    return (
        f"{STEPS} steps, the same losses; Megatron waits {before.total()} times at {len(before)} places, no place more"
    )


def like_the_cpu() -> str:
    """Spans are those of the run on the CPU, and losses nearly."""
    there, here = trained(*SMALL, asked="instrumented", cpu=True), instrumented()
    require(there.counts(0) == here.counts(0), f"spans: {there.counts(0)} became {here.counts(0)}")
    pairs = [(float(a[1]), float(b[1])) for a, b in zip(there.losses, here.losses, strict=True)]
    worst = max(abs(b - a) / abs(a) for a, b in pairs)
    require(worst < 1e-3, f"losses: {there.losses} became {here.losses}")
    return f"{len(here.spans)} spans, as on the CPU; losses within {worst:.1e}"


def graphs() -> str:
    """CUDA graphs of the iteration and of the optimizer: the same losses, and spans of what Python still runs."""
    before, run = (trained(*SMALL, *GRAPHS, asked=asked) for asked in ("", "instrumented"))
    require(before.losses == run.losses, f"losses: {before.losses} became {run.losses}")
    passes = [span for span in run.spans if span.name == "megatron.forward_backward"]
    require(len(passes) == STEPS, f"{len(passes)} passes in {STEPS} steps")
    for number, span in enumerate(passes):
        inside = {child.name for child in span.children}
        replayed = inside == {"megatron.data_loading"}
        require(replayed == (number >= WARM_UP), f"step {number + 1} has {sorted(inside)}")
    number = run.counts(0)["megatron.optimizer_step"]
    require(number == STEPS, f"{number} spans of the optimizer in {STEPS} steps")
    return f"{STEPS} steps, {STEPS - WARM_UP} of them replayed, with the same losses"


def overhead() -> str:
    """What instrumentation costs a larger model."""
    block, model = (4, ()) if on_cpu else (20, LARGER)
    iterations = ("--train-iters", str(block * BLOCKS), "--eval-interval", "10000")
    run = trained(*model, *iterations, asked="instrumented", more={"MEGATRON_OTEL_AB": str(block)})
    found = re.search(r"overhead: (.* pairs of blocks of \d+ steps\))", run.output)
    require(found is not None, f"it isn't told:\n{run.output[-3000:]}")
    times = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", run.output)
    return f"{found[1]}, of {float(times[-1]):.0f} ms"


PARTS = {"steps": steps, "like-the-cpu": like_the_cpu, "graphs": graphs, "overhead": overhead}


def main(words: list[str]) -> int:
    global on_cpu
    import torch

    on_cpu = "--on-cpu" in words
    names = [word for word in words if word != "--on-cpu"] or list(PARTS)
    if unknown := set(names) - set(PARTS):
        print(f"There is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}.")
        return 2
    if not on_cpu and not torch.cuda.is_available():
        print("There is no GPU here: nothing was checked. --on-cpu tries what can be tried without one.")
        return 3
    device = "the CPU, with stand-ins for the device: nothing is shown of a GPU"
    print(f"On {device if on_cpu else torch.cuda.get_device_name()}:", flush=True)
    started, status = time.monotonic(), 0
    for name in names:
        if time.monotonic() - started > LIMIT_S - 2 * RUN_S:
            print(f"{name}: NOT RUN, as the time is over", flush=True)
            status = 1
            continue
        try:
            print(f"{name}: ok: {PARTS[name]()}", flush=True)
        except Exception as error:  # noqa: BLE001
            what = str(error) if isinstance(error, Failed) else traceback.format_exc()
            print(f"{name}: FAILED: {what}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
