import argparse


def add_megatron_arguments(parser):
    parser.add_argument("--train-iters", type=int, default=3)
    return parser


def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
