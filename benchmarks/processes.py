"""What whole processes cost: real Megatron runs with each preset against plain ones, in time, CPU, memory and exit, and
Python's start. Run it alone on a quiet machine: python benchmarks/processes.py [ROUNDS].
"""

import contextlib
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import grpc
from instructions import callgrind, instructions

from megatron_autoinstrument.ab import overhead

ROOT = Path(__file__).parents[1]
RANKS, WARM_UP, STEPS, ROUNDS = 2, 20, 100, 8
AB_BLOCK, AB_BLOCKS = 10, 82
TRAINING = [
    sys.executable,
    str(ROOT / "fixtures" / "pretrain_tiny_gpt.py"),
    *(ROOT / "fixtures" / "tiny_gpt.args").read_text().split(),
    *("--pipeline-model-parallel-size", str(RANKS), "--eval-iters", "0"),
]
ITERATION = re.compile(r" iteration +(\d+)/.* elapsed time per iteration \(ms\): ([\d.]+)")
PRESETS = ("plain", "default", "per_step", "all")

STARTS = 40
SDK = """
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
"""
# What a process does at its start, whether it has the .pth file, and whether the variable is set.
PROCESSES = {
    "nothing": ("", False, False),
    "the `.pth` line, off": ("", True, False),
    "the `.pth` line, on, without Megatron": ("", True, True),
    "`from megatron_autoinstrument import MegatronInstrumentor`": (
        "from megatron_autoinstrument import MegatronInstrumentor",
        False,
        False,
    ),
    "of that, OpenTelemetry's own base class": (
        "from opentelemetry.instrumentation.instrumentor import BaseInstrumentor",
        False,
        False,
    ),
    "when a model is built on a rank that records: OpenTelemetry's SDK and OTLP/gRPC exporters": (SDK, False, False),
}
# OpenTelemetry alone, in a process that has torch, with traces and metrics sent.
SDK_ALONE = f"""
import torch
def resident():
    return int(open("/proc/self/statm").read().split()[1])
before = resident()
{SDK}
tracers, meters = TracerProvider(), MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracers.get_tracer("alone").start_span("").end()
meters.get_meter("alone").create_counter("a").add(1)
tracers.force_flush(), meters.force_flush()
print(resident() - before)
"""


class Run(NamedTuple):
    """A finished run; CPU and spans are those of both ranks, memory is one rank's."""

    step_ms: float  # the mean without the shortest and the longest twentieth
    cpu_ms: float  # per step
    resident_mib: float  # with the last step
    peak_mib: float
    exit_ms: float  # from the last step's line of log to the end of both ranks
    spans: float  # per step
    bytes: float  # per step
    collector_ms: float  # per step
    output: str


@contextlib.contextmanager
def collector():
    """An OTLP/gRPC collector in a process of its own: the variables that lead to it, and a pipe that gives what it has
    received once it is asked."""
    context = multiprocessing.get_context("spawn")  # gRPC bears no fork
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other,))
    process.start()
    try:
        yield pipe, {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{pipe.recv()}", "no_proxy": "127.0.0.1"}
    finally:
        process.terminate()
        process.join()


def serve(pipe):
    """Takes everything and looks at none of it while ranks run, to which it gives way."""
    os.nice(19)
    requests = []

    def take(request, context):
        requests.append(request)
        return b""

    def ignore(request, context):
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, call):
            return grpc.unary_unary_rpc_method_handler(take if "Trace" in call.method else ignore)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    started = time.process_time()
    pipe.recv()
    used = time.process_time() - started
    server.stop(None).wait()
    pipe.send((spans_per_step(requests), sum(map(len, requests)), used))


def spans_per_step(requests):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    names = defaultdict(list)
    for request in map(ExportTraceServiceRequest.FromString, requests):
        for span in (s for resource in request.resource_spans for scope in resource.scope_spans for s in scope.spans):
            names[span.trace_id].append(span.name)
    steps = [len(trace) for trace in names.values() if "megatron.train_step" in trace]
    return fmean(steps) if steps else 0.0


def environment(more):
    base = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "MEGATRON_", "NEMO_"))}
    return {**base, **more}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def cpu_ms(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def resident_mib(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(preset, steps=WARM_UP + STEPS, **more):
    """A run of Megatron's, as torchrun would start it, with a collector; `more` are variables to set."""
    variables = {
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "OTEL_BSP_SCHEDULE_DELAY": "1000",  # so that the steps that are measured pay for the export of as many
        **({} if preset == "plain" else {"MEGATRON_OTEL_ENABLED": "1", "MEGATRON_OTEL_SPAN_GROUPS": preset}),
        "MEGATRON_OTEL_RANK_STRATEGY": "all_ranks",
        **more,
    }
    times, cpu, resident, ended = [], 0.0, 0.0, 0.0
    with collector() as (received, endpoint), tempfile.TemporaryFile("w+") as log:
        ranks = [
            subprocess.Popen(
                [*TRAINING, "--train-iters", str(steps)],
                env=environment({**variables, **endpoint, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
                stdout=subprocess.PIPE if rank == RANKS - 1 else log,  # Megatron prints its steps on the last
                stderr=log,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            for line in ranks[-1].stdout:
                if (found := ITERATION.search(line)) is None:
                    continue
                iteration = int(found[1])
                if iteration > WARM_UP:
                    times.append(float(found[2]))
                if iteration in (WARM_UP, steps):
                    cpu = sum(map(cpu_ms, ranks)) - cpu
                if iteration == steps:
                    ended, resident = time.perf_counter(), fmean(map(resident_mib, ranks))
            peaks = []
            for rank in ranks if ended else ():
                _, status, usage = os.wait4(rank.pid, 0)
                rank.returncode = os.waitstatus_to_exitcode(status)
                peaks.append(usage.ru_maxrss / 1024)
            exit_ms = (time.perf_counter() - ended) * 1000
        finally:
            for rank in ranks:
                rank.kill()
        log.seek(0)
        output = log.read()
        if any(rank.returncode for rank in ranks) or not ended:
            sys.exit(f"A run of {preset} failed:\n{output[-3000:]}")
        received.send(None)
        spans, size, collecting = received.recv()
    # Not the median: a step that a batch is exported in is part of the cost.
    usual = sorted(times)[len(times) // 20 : -len(times) // 20]
    return Run(
        fmean(usual),
        cpu / len(times),
        resident,
        fmean(peaks),
        exit_ms,
        spans,
        size / steps,
        collecting / steps * 1000,
        output,
    )


def compare():
    """Runs of all presets, each round in another order."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    runs = {preset: [] for preset in PRESETS}
    for number in range(rounds):
        for place in range(len(PRESETS)):
            preset = PRESETS[(number + place) % len(PRESETS)]
            runs[preset].append(train(preset))
    return runs


def added(runs, preset, figure):
    """By how much a figure is above plain's of the same round, and in which range nearly all of that is."""
    off, on = ([getattr(run, figure) for run in runs[name]] for name in ("plain", preset))
    percents = [(b - a) / a * 100 for a, b in zip(off, on, strict=True)]
    typical, low, high, *_ = overhead(zip(off, on, strict=True)) or (median(percents), min(percents), max(percents))
    return f"{typical:+.1f} % ({low:+.1f} to {high:+.1f})"


def in_one_run(preset):
    """What a run finds out about itself by MEGATRON_OTEL_AB."""
    run = train(preset, steps=AB_BLOCK * AB_BLOCKS, MEGATRON_OTEL_AB=str(AB_BLOCK))
    found = re.search(r"overhead: (\S+ %) of a step, \S+ % confidence interval (\S+ to \S+) %", run.output)
    return f"{found[1]} ({found[2]})" if found else "too few steps"


def typical(runs, preset, figure):
    return median(getattr(run, figure) for run in runs[preset])


def start_up():
    """The times of each of PROCESSES in ms, in turn, and where they can be counted the millions of its instructions."""
    times, counts = {name: [] for name in PROCESSES}, {}
    with tempfile.TemporaryDirectory() as with_pth, tempfile.TemporaryDirectory() as without:
        shutil.copy(ROOT / "megatron_autoinstrument.pth", with_pth)

        def start(name, counted_in=None):
            code, pth, on = PROCESSES[name]
            # Without site, which would run the .pth files of this environment.
            code = f"import site; site.addsitedir({with_pth if pth else without!r})\n{code}"
            command = [sys.executable, "-S", "-c", code]
            variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{sysconfig.get_path('purelib')}", "PYTHONHASHSEED": "0"}
            subprocess.run(
                callgrind(command, counted_in) if counted_in else command,
                env=environment({**variables, **({"MEGATRON_OTEL_ENABLED": "1"} if on else {})}),
                check=True,
            )

        for name in PROCESSES if shutil.which("valgrind") else ():
            start(name, counted_in=f"{without}/out")
            counts[name] = instructions(f"{without}/out") / 1e6
        for _ in range(STARTS):
            for name, measured in times.items():
                started = time.perf_counter()
                start(name)
                measured.append((time.perf_counter() - started) * 1000)
    return times, counts


def sdk_alone_mib():
    with collector() as (_, endpoint):
        command = [sys.executable, "-c", SDK_ALONE]
        process = subprocess.run(command, env=environment(endpoint), stdout=subprocess.PIPE, text=True, check=True)
    return int(process.stdout) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main():
    runs = compare()
    alternating = {preset: in_one_run(preset) for preset in PRESETS[1:]}
    count = len(runs["plain"])
    print(f"{RANKS} pipeline stages, {STEPS} steps of each, {count} times, in turn; in brackets", end=" ")
    print("a confidence interval of 95 % or more." if count >= 8 else "the least and the most (fewer than 8 runs).")
    print()
    print("| | spans in a step | bytes of them | step, ms | | least | ", end="")
    print(f"`MEGATRON_OTEL_AB={AB_BLOCK}` in one run | CPU of both ranks in a step, ms | | least |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for preset in PRESETS:
        figures = {figure: typical(runs, preset, figure) for figure in Run._fields if figure != "output"}
        step, cpu = (added(runs, preset, f) if preset != "plain" else "" for f in ("step_ms", "cpu_ms"))
        least = [min(getattr(run, figure) for run in runs[preset]) for figure in ("step_ms", "cpu_ms")]
        print(
            f"| {preset} | {figures['spans']:.0f} | {figures['bytes']:,.0f} "
            f"| {figures['step_ms']:.1f} | {step} | {least[0]:.1f} | {alternating.get(preset, '')} "
            f"| {figures['cpu_ms']:.1f} | {cpu} | {least[1]:.1f} |"
        )
    print()
    extra = fmean(b.cpu_ms - a.cpu_ms for a, b in zip(runs["plain"], runs["all"], strict=True))
    print(f"With `all` that is {extra / typical(runs, 'all', 'spans') * 1000:.0f} µs of CPU per span.", end=" ")
    print(f"The collector took {typical(runs, 'all', 'collector_ms'):.1f} ms of CPU per step more, at low priority.")
    print()
    print("| one rank | resident at the last step, MiB | at most, MiB | from the last step to the end, ms |")
    print("|---|---|---|---|")
    figures = ("resident_mib", "peak_mib", "exit_ms")
    plain = [typical(runs, "plain", figure) for figure in figures]
    print(f"| plain | {' | '.join(f'{figure:.0f}' for figure in plain)} |")
    for preset in PRESETS[1:]:
        more = [typical(runs, preset, figure) - base for figure, base in zip(figures, plain, strict=True)]
        print(f"| {preset} | {' | '.join(f'{figure:+.0f}' for figure in more)} |")
    print(f"| OpenTelemetry and gRPC alone, beside torch | {sdk_alone_mib():+.0f} | | |")
    print()
    print(f"| beyond a bare Python, {STARTS} of each in turn | median, ms | least, ms | million instructions |")
    print("|---|---|---|---|")
    times, counts = start_up()
    bare, *others = PROCESSES
    for name in others:
        typically, least = (figure(times[name]) - figure(times[bare]) for figure in (median, min))
        counted = f"{counts[name] - counts[bare]:+.1f}" if counts else ""
        print(f"| {name} | {typically:+.1f} | {least:+.1f} | {counted} |")


if __name__ == "__main__":
    main()
