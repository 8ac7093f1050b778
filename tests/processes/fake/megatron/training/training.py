import logging
import random

from megatron.training import global_vars

_LEGACY_TRAIN_START_TIME = 1000.0


def setup_model_and_optimizer():
    random.seed(1234)


def train_step(iteration):
    logging.getLogger("megatron.training").warning("step")
    return random.random()


def train():
    for iteration in range(global_vars._GLOBAL_ARGS.train_iters):
        print("loss", train_step(iteration), flush=True)


def pretrain():
    setup_model_and_optimizer()
    train()
