"""Trains the tiny GPT with data workers in a step, started as the variable START says, that say what is in them."""

import os
import sys
import threading

import pretrain_tiny_gpt
import torch

# The device is stood in for; what finds none leaves the batches where they are.
torch.accelerator.is_available = lambda: False

get_item = pretrain_tiny_gpt.RandomTokens.__getitem__
parent = os.environ.setdefault("PARENT", str(os.getpid()))
told = set()


def telling(self, index):
    if str(os.getpid()) != parent and os.getpid() not in told:
        told.add(os.getpid())
        spans = sys.modules.get("megatron_autoinstrument.instrumentor")
        open_records = spans is not None and spans.RECORDER.current is not None
        mine = [thread.name for thread in threading.enumerate() if "megatron" in thread.name or "Otel" in thread.name]
        os.write(1, f"\nWORKER {os.getpid()} recording={open_records} threads={mine}\n".encode())
    return get_item(self, index)


pretrain_tiny_gpt.RandomTokens.__getitem__ = telling

forward_step = pretrain_tiny_gpt.forward_step


def with_workers_of_its_own(data_iterator, model, *args, **kwargs):
    """Megatron's own data loader can't spawn: what its workers start with is no global function."""
    if not told:
        told.add(os.getpid())
        data = pretrain_tiny_gpt.RandomTokens(4, 8, 16)
        list(torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context=os.environ["START"]))
    return forward_step(data_iterator, model, *args, **kwargs)


if __name__ == "__main__":
    pretrain_tiny_gpt.forward_step = with_workers_of_its_own
    pretrain_tiny_gpt.main()
