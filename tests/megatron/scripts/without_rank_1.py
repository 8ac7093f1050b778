"""Trains the tiny GPT with the instrumentation of one rank turned off by hand: the others know nothing of it."""

import os

if os.environ["RANK"] == "1":
    os.environ["MEGATRON_OTEL_ENABLED"] = "0"

import pretrain_tiny_gpt

pretrain_tiny_gpt.main()
