"""Trains the tiny GPT and prints what is left of the random state, of Python's and torch's generators."""

import hashlib
import os
import random

import pretrain_tiny_gpt
import torch

pretrain_tiny_gpt.main()
state = hashlib.sha256(repr(random.getstate()).encode() + bytes(torch.get_rng_state().tolist())).hexdigest()
os.write(1, f"\nRANDOM STATE {os.environ['RANK']} {state}\n".encode())  # at once, whatever the other rank writes
