"""A training loop of one's own on Megatron core alone, as those have it who install no `megatron.training`.

Two pipeline stages, real DDP, schedule and optimizer. Options: --bf16 (the mixed-precision optimizer in place of the
distributed one), --finalize-after (gradients are finalized by the loop, not by the schedule), --evaluate.
"""

# ruff: noqa: E402
import megatron  # isort: skip

megatron.__path__ = list(megatron.__path__)[:1]  # a namespace package: without what else is installed of it

import cuda_on_cpu  # noqa: F401  # isort: skip

import argparse
import importlib.util
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, VOCABULARY, BATCH, MICROBATCHES, ITERATIONS = 16, 64, 2, 4, 3

parser = argparse.ArgumentParser()
for flag in ("--bf16", "--finalize-after", "--evaluate"):
    parser.add_argument(flag, action="store_true")
options = parser.parse_known_args()[0]  # the harness gives Megatron's, too
assert importlib.util.find_spec("megatron.training") is None, "this Megatron is more than its core"
print("MEGATRON CORE", megatron.core.__version__)


def build():
    numbers = torch.bfloat16 if options.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=2,
        pipeline_dtype=numbers,
        params_dtype=numbers,
        bf16=options.bf16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(numbers)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=not options.bf16), gpt
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            params_dtype=numbers,
            bf16=options.bf16,
            use_distributed_optimizer=not options.bf16,
            clip_grad=1.0,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    if not options.finalize_after:
        config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def batches():
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def forward_step(iterator, model):
    tokens = next(iterator)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss_of


def loss_of(output):
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
torch.manual_seed(1)
model_parallel_cuda_manual_seed(1)
model, optimizer = build()
iterator = batches()
run = partial(
    get_forward_backward_func(),
    forward_step_func=forward_step,
    data_iterator=iterator,
    model=[model],
    num_microbatches=MICROBATCHES,
    seq_length=LENGTH,
    micro_batch_size=BATCH,
)


def printed(what, losses, norm=""):
    if losses:  # on the last stage
        print(what, *(repr(loss["loss"].item()) for loss in losses), norm, flush=True)


for iteration in range(1, ITERATIONS + 1):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = run(forward_only=False)
    if options.finalize_after:
        finalize_model_grads([model])
    successful, norm, _ = optimizer.step()
    assert successful
    printed(f"ITERATION {iteration}", losses, norm)
    if options.evaluate and iteration == 2:
        model.eval()
        with torch.no_grad():
            printed("EVALUATION", run(forward_only=True))
        model.train()

torch.distributed.barrier()
torch.distributed.destroy_process_group()
