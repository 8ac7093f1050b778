"""Trains the tiny GPT as --overlap-moe-expert-parallel-comm wants it: the forward step gives a plan, not an output."""

from functools import partial

import cuda_on_cpu  # noqa: F401  (first: it must precede every Megatron import)
import pretrain_tiny_gpt
import torch

forward_step = pretrain_tiny_gpt.forward_step


def plan(data_iterator, model, return_schedule_plan=False):
    if not return_schedule_plan:  # an evaluation
        return forward_step(data_iterator, model)
    args, batch = pretrain_tiny_gpt.get_args(), next(data_iterator)
    length, size = args.seq_length, args.micro_batch_size
    positions = torch.arange(length).unsqueeze(0).expand(size, -1)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    made = model.build_schedule_plan(batch["tokens"], positions, mask, labels=batch["labels"])
    return made, partial(pretrain_tiny_gpt.loss_function, torch.ones(size * length))


def all_to_all_single(
    output,
    input,
    output_split_sizes=None,
    input_split_sizes=None,
    all_to_all=torch.distributed.all_to_all_single,
    **more,
):
    """Megatron makes the sizes lists of numbers on their way from the device, where it is one."""
    sizes = [x.tolist() if isinstance(x, torch.Tensor) else x for x in (output_split_sizes, input_split_sizes)]
    return all_to_all(output, input, *sizes, **more)


torch.distributed.all_to_all_single = all_to_all_single
torch.Tensor.record_stream = lambda self, stream: None
pretrain_tiny_gpt.forward_step = plan
pretrain_tiny_gpt.main()
