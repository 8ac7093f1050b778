"""Prints the usage of Megatron's parser. Its whole `--help` fails in core 0.19.2: a text of its own has a bare %."""

import argparse

import cuda_on_cpu  # noqa: F401
from megatron.training.arguments import add_megatron_arguments

print(add_megatron_arguments(argparse.ArgumentParser()).format_usage())
