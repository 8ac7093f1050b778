"""Trains the tiny GPT; each process that writes a file of a distributed checkpoint says what of us is at work in it."""

import os
import sys
import threading

if __name__ == "__main__":  # a child that is spawned loads this file, too
    import telling_seams  # isort: skip

import pretrain_tiny_gpt  # noqa: F401

told = set()


def tell(event, arguments):
    if event != "open" or not str(arguments[0]).endswith(".distcp") or "w" not in str(arguments[1]):
        return
    if os.getpid() not in told:
        told.add(os.getpid())
        spans = sys.modules.get("megatron_autoinstrument.instrumentor")
        at_work = {thread.name for thread in threading.enumerate() if thread.name.startswith("megatron")}
        if spans is not None and (spans.RECORDER.current is not None or spans.RECORDER._waiting):
            at_work.add("records")
        os.write(1, f"\nWRITER {os.getpid()} {sorted(at_work)}\n".encode())


sys.addaudithook(tell)

if __name__ == "__main__":
    telling_seams.train()
