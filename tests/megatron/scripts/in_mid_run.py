"""Uninstruments inside the third iteration and instruments again inside the fifth."""

import pretrain_tiny_gpt
from megatron.training import get_args

from megatron_autoinstrument import MegatronInstrumentor

megatron = MegatronInstrumentor()
forward_step = pretrain_tiny_gpt.forward_step


def forward_step_that_switches(data_iterator, model):
    finished = get_args().curr_iteration
    if model.training and finished == 2 and megatron.is_instrumented_by_opentelemetry:
        megatron.uninstrument()
    if model.training and finished == 4 and not megatron.is_instrumented_by_opentelemetry:
        megatron.instrument()
    return forward_step(data_iterator, model)


pretrain_tiny_gpt.forward_step = forward_step_that_switches
megatron.instrument()
pretrain_tiny_gpt.main()
