"""Trains the tiny GPT with the flags given by the script's own defaults, not on the command line."""

import pretrain_tiny_gpt

pretrain_tiny_gpt.ARGS_DEFAULTS |= {"otel_span_groups": "job,step", "otel_service_name": "llama"}
pretrain_tiny_gpt.main()
