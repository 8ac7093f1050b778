"""Trains the tiny GPT while every function of the package that runs fails in turn, each for the length of a step.

The first steps only look which functions run. From then on each step instruments anew and has one of them raise, at its
first instruction, whenever it is called. What runs before the first step or after the last is not reached so.
"""

import contextlib
import logging
import os
import sys
import types

import pretrain_tiny_gpt
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter

from megatron_autoinstrument import MegatronInstrumentor, instrumentor
from megatron_autoinstrument.export import direct, encode, providers
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.targets import arguments

LOOKING = 4  # steps, an evaluation among them
# The guards themselves: what they call is what they guard.
GUARDS = {"_wrap.<locals>.wrapper", "_Patch.turn_off", "Patcher.silence", "Recorder._get_ready"}
GUARDS |= {"Worker._run", "Worker._do"}
GUARDS |= {f"MegatronInstrumentor.{name}" for name in ("instrument", "_instrument", "uninstrument", "_uninstrument")}
GUARDS |= {"MegatronInstrumentor.instrumentation_dependencies", "_in_turn", "_guarded"}
GUARDS |= {"Outbox.flush"}  # called here
TOOL = sys.monitoring.DEBUGGER_ID
EVENT = sys.monitoring.events.PY_START


def codes_of(value, seen):
    if isinstance(value, types.CodeType):
        if value not in seen and "megatron_autoinstrument" in value.co_filename:
            seen.add(value)
            for constant in value.co_consts:
                codes_of(constant, seen)
    elif isinstance(value, types.FunctionType):
        codes_of(value.__code__, seen)
    elif isinstance(value, (staticmethod, classmethod)):
        codes_of(value.__func__, seen)
    elif isinstance(value, property):
        codes_of(value.fget, seen)
    elif isinstance(value, type) and value.__module__.startswith("megatron_autoinstrument"):
        for inner in vars(value).values():
            codes_of(inner, seen)


def ours():
    seen = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_autoinstrument"):
            for value in list(vars(module).values()):
                codes_of(value, seen)
    # In the same order in each run: what one fault turns off, another doesn't reach.
    in_order = sorted(seen, key=lambda code: (code.co_filename, code.co_firstlineno, code.co_qualname))
    return [code for code in in_order if code.co_qualname not in GUARDS and code.co_name != "<module>"]


running, left, current = [], [], None
messages = []


class Handler(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


def on_start(code, offset):
    if current is None:
        if code not in running:
            running.append(code)
        return sys.monitoring.DISABLE
    if code is current:
        hits[name_of(code)] = hits.get(name_of(code), 0) + 1
        raise RuntimeError(f"injected into {name_of(code)}")
    return None


def say(line):
    """At once: print() lets another rank's line come between."""
    sys.stdout.flush()
    os.write(1, f"\n{line}\n".encode())


def name_of(code):
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}"


hits, step, forward_step = {}, 0, pretrain_tiny_gpt.forward_step
encode_spans = trace_exporter.encode_spans


def boundary():
    """In the first microbatch of each step."""
    global step, current
    step += 1
    if step == 1:
        sys.monitoring.use_tool_id(TOOL, "faults")
        sys.monitoring.register_callback(TOOL, EVENT, on_start)
        for code in ours():
            sys.monitoring.set_local_events(TOOL, code, EVENT)
        logging.getLogger("megatron_autoinstrument").addHandler(Handler())
        logging.getLogger("megatron_autoinstrument").propagate = False
    if step > 1:
        # What our threads do from time to time they are to do in each step.
        with contextlib.suppress(RuntimeError):
            RECORDER.flush()
    if step < LOOKING:
        if step == 2:
            anew()
        return
    if step == LOOKING:
        for code in ours():
            sys.monitoring.set_local_events(TOOL, code, 0)
        left.extend(running)
    before = hits.get(name_of(current), 0) if current is not None else None
    MegatronInstrumentor().uninstrument()
    if current is not None:
        sys.monitoring.set_local_events(TOOL, current, 0)
        name, said = name_of(current), list(messages)
        say(f"FAULT {name} hit={hits.get(name, 0)} said={len(said)} {said[:1]}")
        current = None
        if hits.get(name, 0) != before:  # what failed meanwhile may be half done
            MegatronInstrumentor().instrument()
            MegatronInstrumentor().uninstrument()
    messages.clear()
    direct._given_up = False  # as in a process of its own
    providers._told.clear()
    trace_exporter.encode_spans = encode_spans
    encode._seen.clear()
    encode._encoding.clear()
    for ledger in (instrumentor.PATCHER, arguments.PATCHER):
        ledger._named.clear()
    if left:
        current = left.pop(0)
        sys.monitoring.set_local_events(TOOL, current, EVENT)
        sys.monitoring.restart_events()
    MegatronInstrumentor().instrument()


def anew():
    MegatronInstrumentor().uninstrument()
    MegatronInstrumentor().instrument()


latest = None


def counting(data_iterator, model, *args, **kwargs):
    global latest
    iteration = pretrain_tiny_gpt.get_args().curr_iteration
    if iteration != latest and model.training:
        latest = iteration
        boundary()
    return forward_step(data_iterator, model, *args, **kwargs)


pretrain_tiny_gpt.forward_step = counting
pretrain_tiny_gpt.main()
say(f"NOT REACHED {len(left)}")
