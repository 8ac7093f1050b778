"""A training loop of one's own around Megatron's `setup_model_and_optimizer` and `train_step`, as forks and fine-tuning
tools have it, in a process that learns its rank only when it has imported Megatron, as an actor of Ray does."""

# ruff: noqa: E402
import os

told = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}

import cuda_on_cpu  # noqa: F401  # isort: skip

import inspect

import pretrain_tiny_gpt as tiny
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args, get_timers, training
from megatron.training.initialize import initialize_megatron

try:
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
except ImportError:
    parse_and_validate_args = None  # before core 0.18

os.environ.update(told)
more = {}
if parse_and_validate_args is None:
    initialize_megatron(args_defaults=tiny.ARGS_DEFAULTS)
else:
    configuration = pretrain_cfg_container_from_args(parse_and_validate_args(args_defaults=tiny.ARGS_DEFAULTS))
    initialize_megatron()
    if "cfg_container" in inspect.signature(training.setup_model_and_optimizer).parameters:  # from core 0.19 on
        more = {"cfg_container": configuration, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
model, optimizer, scheduler = training.setup_model_and_optimizer(
    model_type=ModelType.encoder_or_decoder,
    model_provider_func=tiny.model_provider,
    checkpointing_context={},
    **more,
)
args = get_args()
config = get_model_config(model[0])
config.timers = get_timers()
config.finalize_model_grads_func = finalize_model_grads
config.grad_scale_func = optimizer.scale_loss
iterator, *_ = training.build_train_valid_test_data_iterators(tiny.datasets_provider)
for chunk in model:
    chunk.train()
known = inspect.signature(training.train_step).parameters
for iteration in range(args.train_iters):
    args.curr_iteration = iteration
    passed = {"iteration": iteration} if "iteration" in known else {}
    training.train_step(
        *(tiny.forward_step, iterator, model, optimizer, scheduler, config, get_forward_backward_func()), **passed
    )
    training.evaluate(tiny.forward_step, iterator, model, None, config, eval_iters=1)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
