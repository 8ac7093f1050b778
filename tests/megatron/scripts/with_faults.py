"""Trains with seams that this Megatron lacks, and with parts of ours that fail."""

import logging

import pretrain_tiny_gpt

from megatron_autoinstrument import MegatronInstrumentor, targets
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.megatron.patching import Seam
from megatron_autoinstrument.recording.hooks import span

handler = logging.StreamHandler()  # of its own: Megatron sets up the root logger's
handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
logger = logging.getLogger("megatron_autoinstrument")
logger.setLevel(logging.INFO)
logger.addHandler(handler)
logger.propagate = False

targets.SEAMS += (
    Seam("megatron.training.training", "no_such_function", {"step"}, span("megatron.train_step")),
    Seam("megatron.core.pipeline_parallel.schedules", "NoSuchClass.step", {"step"}, span("megatron.train_step")),
    Seam("megatron.core.no_such_module", "function", {"step"}, span("megatron.train_step")),
)
begin, end, end_call = RECORDER.begin_frequent, RECORDER.end, RECORDER.end_call


def begin_with_fault(name, *args, **kwargs):
    if name == "megatron.microbatch.forward":
        raise RuntimeError("injected")
    return begin(name, *args, **kwargs)


def end_with_fault(record, *args, **kwargs):
    if record.name == "megatron.evaluate":
        raise RuntimeError("injected")
    end(record, *args, **kwargs)


def end_call_with_fault(record, result, error):
    if record.name == "megatron.p2p.send_forward":
        raise RuntimeError("injected")
    end_call(record, result, error)


RECORDER.begin_frequent, RECORDER.end, RECORDER.end_call = begin_with_fault, end_with_fault, end_call_with_fault
MegatronInstrumentor().instrument()
pretrain_tiny_gpt.main()
