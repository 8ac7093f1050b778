"""What OpenTelemetry reads of the environment."""

import re
from pathlib import Path

import opentelemetry.sdk

SITE = Path(next(iter(opentelemetry.sdk.__path__))).parent


def variables():
    """All that OpenTelemetry's packages know, as they stand in their sources."""
    sources = "".join(file.read_text() for file in SITE.rglob("*.py"))
    return sorted(set(re.findall(r"""["'](OTEL_[A-Z0-9_]+[A-Z0-9])["']""", sources)))
