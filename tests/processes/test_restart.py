"""An in-process restart: nvidia-resiliency-ext raises a BaseException into any line that the training thread is at, one
of ours too, and calls `pretrain` again in the same process. The run is that of fixtures/standin_run.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = """
import ctypes, dis, functools, gc, json, logging, sys, threading, time
import standin_run
standin_run.install()
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import megatron_autoinstrument
from megatron_autoinstrument import MegatronInstrumentor
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import Record

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("megatron_autoinstrument").addHandler(Said())
FOLDER = megatron_autoinstrument.__path__[0]
restarts = 0

class Restart(BaseException):
    pass

def instrument():
    MegatronInstrumentor().uninstrument()
    assert not is_wrapped()
    MegatronInstrumentor().instrument(tracer_provider=provider)
    assert is_wrapped()

def is_wrapped():
    return hasattr(sys.modules["megatron.training.training"].train_step, "__wrapped__")

def run():
    "One run; its losses."
    global restarts
    restarts += 1
    run = standin_run.Run(2, every=1, restarts=restarts)
    run.pretrain()
    return run.losses

def raise_into_training():
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(Restart)
    )

def flush():
    while not RECORDER.flush():  # it has a bound of seconds, which a busy machine may take
        pass

def clean_run():
    "What is recorded of a run, and what it leaves behind."
    standin_run.Run.autograd.do(lambda: None)  # what a restart has left it to do is done
    flush()  # and what that has cost is told
    said.clear()
    exporter.clear()
    began = time.time_ns()
    losses = run()
    flush()
    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.start_time >= began}
    def path(span):
        above = path(spans[span.parent.span_id]) + " > " if span.parent else ""
        return above + span.name
    found = sorted(
        (path(span), sorted(span.attributes), len(span.links), span.status.status_code.name) for span in spans.values()
    )
    left = {
        "current": RECORDER.current is not None,
        "context": trace.get_current_span().get_span_context().is_valid,
        "waiting": len(RECORDER._waiting) + len(RECORDER._elsewhere) + len(RECORDER._background),
        "threads": sorted(thread.name for thread in threading.enumerate() if not thread.name.endswith("signals")),
    }
    return {"spans": found, "left": left, "losses": losses, "said": list(said)}
"""
EACH_POINT = """
# Where CPython looks for such an exception: at the start of a function, after a call, and where a loop goes back.
LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD")
names = functools.cache(lambda code: {at.offset: at.opname for at in dis.get_instructions(code)})

def name_of(code):
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the latter alone

def trace_run(interrupt_at):
    "Runs, and raises at the so-manieth point in this package (None: at none): where they are, and whether it got out."
    points, latest = [], {}
    def tracer(frame, event, argument):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, latest[frame] = latest.get(frame), frame.f_lasti
            if before is not None and names(frame.f_code)[before].startswith(LOOKS):
                if len(points) == interrupt_at:
                    raise_into_training()
                points.append((name_of(frame.f_code), frame.f_lineno, before))
        elif event == "return":
            latest.pop(frame, None)
        return tracer
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 traces no opcodes
    sys.settrace(tracer)
    try:
        run()
        interrupted = False
    except Restart:
        interrupted = True
    finally:
        sys.settrace(None)
    return points, interrupted

instrument()
run()  # what is made once is there
expected = clean_run()
instrument()
seen, _ = trace_run(None)
first = {what: at for at, what in reversed(list(enumerate(seen)))}
last = {what: at for at, what in enumerate(seen)}
points = sorted({*first.values(), *last.values()})
part, parts = map(int, sys.argv[1:])
wrong = []
points = points[part::parts]
for at in points:
    instrument()
    _, interrupted = trace_run(at)
    found = clean_run()
    if found != expected:
        wrong.append([seen[at], interrupted, {key: found[key] for key in found if found[key] != expected[key]}])
        said.clear()
gc.collect()
records = sum(type(thing) is Record for thing in gc.get_objects())
print(json.dumps({"spans": len(expected["spans"]), "points": len(points), "wrong": wrong, "records": records}))
"""


def result(code, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "MEGATRON_"))}
    done = subprocess.run(
        [sys.executable, "-c", START + code, *map(str, arguments)],
        env={**environment, "PYTHONPATH": f"{ROOT / 'fixtures'}", "MEGATRON_OTEL_SPAN_GROUPS": "all"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_restart_raised_into_any_line_leaves_nothing_behind_in_the_next_run():
    """At every twentieth point, which changes with the code: all of them take minutes."""
    found = result(EACH_POINT, 0, 20)
    assert found["points"] > 50
    assert found["spans"] > 100
    assert not found["wrong"]
    assert found["records"] < 20  # not some of each run
