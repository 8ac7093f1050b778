"""Trains the tiny GPT; rank 1 crashes in the fourth step of torchrun's first attempt."""

import os

import pretrain_tiny_gpt

CRASHES = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"
forward_step = pretrain_tiny_gpt.forward_step


def crashing(data_iterator, model, *args, **kwargs):
    if CRASHES and pretrain_tiny_gpt.get_args().curr_iteration == 3:
        raise RuntimeError("this rank crashes")
    return forward_step(data_iterator, model, *args, **kwargs)


pretrain_tiny_gpt.forward_step = crashing
pretrain_tiny_gpt.main()
