"""What an error says is exported; what the process was told in confidence is not."""

import sys

import pytest

from megatron_autoinstrument.redact import redacted


@pytest.fixture(autouse=True)
def _given(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer s3cr3t,tenant=blue")
    monkeypatch.setenv("WANDB_API_KEY", "abcdef")
    monkeypatch.setenv("MASTER_NAME", "node-17.cluster")
    monkeypatch.setenv("WORD", "training")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MAX_TOKENS", "4096")
    monkeypatch.setenv("TOKENIZER_MODEL", "GPT2BPETokenizer")
    monkeypatch.setattr(
        sys, "argv", ["pretrain.py", "--data-path=/data/our corpus", "--name", "customer-42", "training"]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no such file: /data/our/corpus.bin", "no such file: <path>"),
        ("no such file: '~/corpus.bin'", "no such file: '<path>'"),
        ('File "/opt/venv/lib/megatron/training/training.py", line 3', 'File "megatron/training/training.py", line 3'),
        ("sent Bearer s3cr3t", "sent <OTEL_EXPORTER_OTLP_HEADERS> <OTEL_EXPORTER_OTLP_HEADERS>"),
        ("key abcdef was refused", "key <WANDB_API_KEY> was refused"),
        ("cannot reach node-17.cluster:29500", "cannot reach <MASTER_NAME>:29500"),
        ("customer-42 has no weights", "<argument> has no weights"),
        # What errors are made of stays.
        ("expected 4096 but got false from GPT2BPETokenizer", "expected 4096 but got false from GPT2BPETokenizer"),
        ("CUDA out of memory. Tried to allocate 2.5 GiB", "CUDA out of memory. Tried to allocate 2.5 GiB"),
        ("in training_log: shape [2, 64] and/or dtype", "in training_log: shape [2, 64] and/or dtype"),
    ],
)
def test_only_what_was_given_in_confidence_is_taken_out(text, expected):
    assert redacted(text) == expected
