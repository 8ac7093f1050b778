"""Instruments, imports more, binds names, trains, uninstruments, and prints as JSON what is not as it was before.

With CONTROL=1 it does all that without instrumenting: what Megatron itself changes. Before, it instruments for each
span group alone and for all others, and prints what is replaced then.
"""

import contextlib
import copy
import importlib
import inspect
import json
import os
import pickle
import sys

import pretrain_tiny_gpt
import wrapt

from megatron_autoinstrument import MegatronInstrumentor, instrumentor
from megatron_autoinstrument.common import groups
from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.targets import SEAMS

CONTROL = os.environ.get("CONTROL") == "1"


def megatron_modules():
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "megatron"}


def state():
    """Every attribute of Megatron's modules and classes, and every global of this script and of the trainer."""
    found = {}
    holders = {**megatron_modules(), "__main__": sys.modules["__main__"], "tiny": pretrain_tiny_gpt}
    for name, module in holders.items():
        for attribute, value in list(vars(module).items()):
            found[name, attribute] = value
            if inspect.isclass(value) and value.__module__.partition(".")[0] == "megatron":
                for member, inner in list(vars(value).items()):
                    found[value.__module__, value.__qualname__, member] = inner
    return found


def behaviour():
    """What differs between each replaced thing and its original, to whoever copies, pickles or inspects it."""
    problems = []
    for _, holder, name, original, replacement, _ in instrumentor.PATCHER._replacements:
        where = f"{holder.__name__}.{name}"
        if inspect.signature(replacement) != inspect.signature(original):
            problems.append(f"{where}: signature")
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            if getattr(replacement, attribute) != getattr(original, attribute):
                problems.append(f"{where}: {attribute}")
        if copy.deepcopy(replacement) is not replacement:
            problems.append(f"{where}: deepcopy")
        try:
            if pickle.loads(pickle.dumps(replacement)) is not replacement:
                problems.append(f"{where}: another object after pickling")
        except Exception as error:  # noqa: BLE001
            problems.append(f"{where}: pickle: {error}")
    return problems


def bound_methods():
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    problems = []
    for cls, name in ((DistributedDataParallel, "start_grad_sync"), (P2PCommunicator, "recv_forward")):
        one, other = cls.__new__(cls), cls.__new__(cls)
        if getattr(one, name) != getattr(one, name) or hash(getattr(one, name)) != hash(getattr(one, name)):
            problems.append(f"{name}: not equal to itself")
        if getattr(one, name).__func__ is not vars(cls)[name]:
            problems.append(f"{name}: another function")
        if getattr(one, name) == getattr(other, name):
            problems.append(f"{name}: equal to another object's")
    communicator = P2PCommunicator.__new__(P2PCommunicator)
    copied = copy.deepcopy({"config": {"recv": communicator.recv_forward}})
    if not isinstance(copied["config"]["recv"].__self__, P2PCommunicator):
        problems.append("deepcopy of a configuration with a bound method")
    if pickle.loads(pickle.dumps(communicator.recv_forward)).__name__ != "recv_forward":
        problems.append("pickle of a bound method")
    return problems


def functions():
    """What each seam names now, where this Megatron has it."""
    found = {}
    for seam in SEAMS:
        module = sys.modules.get(seam.module)
        if module is None or (seam.unless and patching._exists(module, seam.unless)):
            continue
        with contextlib.suppress(AttributeError):
            holder, _, function = wrapt.resolve_path(module, seam.path)
            if patching._can_wrap(holder, function):
                found[seam] = function
    return found


def replaced_with(wanted, environment):
    """Which seams' functions are others with these settings, against those that need one of the groups `wanted`;
    and what else of Megatron is."""
    everything, originals, kept = state(), functions(), os.environ.copy()
    os.environ.update(environment)
    MegatronInstrumentor().instrument()
    os.environ.clear()
    os.environ.update(kept)
    instrumented, now = state(), functions()
    MegatronInstrumentor().uninstrument()
    named = {id(function) for function in originals.values()}
    return {
        "replaced": sorted({str(seam.path) for seam in originals if now[seam] is not originals[seam]}),
        "needed": sorted({str(seam.path) for seam in originals if seam.groups & (wanted | {groups.FLAGS})}),
        "besides": sorted(
            ".".join(key)
            for key, value in everything.items()
            if instrumented[key] is not value and id(value) not in named
        ),
        "left": sorted(".".join(key) for key, value in state().items() if everything.get(key) is not value),
    }


def by_settings():
    every = set(groups.GROUPS)
    cases = {f"{group} alone": {group} for group in every} | {f"all but {group}": every - {group} for group in every}
    off = {"MEGATRON_OTEL_METRICS_ENABLED": "0"}
    return {
        name: replaced_with(on, {**off, "MEGATRON_OTEL_SPAN_GROUPS": ",".join(sorted(on))})
        for name, on in cases.items()
    } | {
        "turned off": replaced_with(set(), {"MEGATRON_OTEL_ENABLED": "0"}),
        "a rank that doesn't export": replaced_with(
            set(), {"WORLD_SIZE": "2", "MEGATRON_OTEL_RANK_STRATEGY": "single_rank"}
        ),
    }


bound_before = pretrain_tiny_gpt.pretrain
settings = {} if CONTROL else by_settings()
before = state()
if not CONTROL:
    MegatronInstrumentor().instrument()
patched = len(instrumentor.PATCHER._replacements)
during = state()
different = sum(during[key] is not before[key] for key in before)
problems = [] if CONTROL else behaviour() + bound_methods()

importlib.import_module(os.environ["LATE_MODULE"])

pretrain_tiny_gpt.main()

if not CONTROL:
    MegatronInstrumentor().uninstrument()
after = state()
wrappers = {id(patch.wrapper) for patch in instrumentor.PATCHER._patches.values()}
print(
    "PROCESS STATE",
    json.dumps(
        {
            "patched": patched,
            "seams": len(SEAMS),
            "different_while_installed": different,
            "problems": problems,
            "not_as_before": sorted(
                ".".join(key) for key in before if key not in after or after[key] is not before[key]
            ),
            "wrappers_left": sorted(".".join(key) for key, value in after.items() if id(value) in wrappers),
            "settings": settings,
            "new_modules": sorted({key[0] for key in after} - {key[0] for key in before}),
        }
    ),
    flush=True,
)
