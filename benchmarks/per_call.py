"""What a wrapped call costs on the training thread, and a frequent span afterwards in ours, in microseconds.

Run it alone on a quiet machine: python benchmarks/per_call.py
"""

import sys
import time
import timeit
import types

from opentelemetry.sdk.trace import TracerProvider

from megatron_autoinstrument import sdk
from megatron_autoinstrument.patching import Ledger, Seam
from megatron_autoinstrument.spans import RECORDER, span

CALLS = 2_000


def best(call, rounds=15):
    """The least time of one call; between rounds what was recorded is handed on."""
    times = []
    for _ in range(rounds):
        times.append(timeit.timeit(call, number=CALLS) / CALLS * 1e6)
        RECORDER.drain()
    return min(times)


def main():
    module = sys.modules["megatron.benchmark"] = types.ModuleType("megatron.benchmark")
    exec(
        "def frequent(x, current_microbatch=None): return x\ndef live(x): return x\ndef off(x): return x", vars(module)
    )
    provider = TracerProvider()
    RECORDER.connect_by(lambda: sdk.connect({"traces": provider}, None, {}))
    bare = best(lambda: module.off(1))
    ledger = Ledger()
    frequent = span("megatron.microbatch.forward", given={"megatron.microbatch_id": "current_microbatch"})
    seams = [
        Seam(module.__name__, "frequent", {"microbatch"}, frequent),
        Seam(module.__name__, "live", {"step"}, span("megatron.train_step", live=True)),
        Seam(module.__name__, "off", {"step"}, span("megatron.train", live=True)),
    ]
    ledger.install(seams, frozenset({"microbatch", "step"}))
    wrapper = module.off
    print(f"a frequent span: {best(lambda: module.frequent(1, current_microbatch=3)) - bare:.2f}")
    print(f"a live span: {best(lambda: module.live(1)) - bare:.2f}")
    for _ in range(10_000):
        module.frequent(1, current_microbatch=3)
    waiting, start = len(RECORDER._waiting), time.perf_counter()
    RECORDER.drain()
    print(f"a frequent span, later, without its export: {(time.perf_counter() - start) / max(waiting, 1) * 1e6:.2f}")
    ledger.uninstall()
    print(f"a wrapper that outlived uninstall(): {best(lambda: wrapper(1)) - bare:.2f}")


if __name__ == "__main__":
    main()
