"""What is taken out of error texts before they leave the process: environment values, command line words, paths."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

_SECRET = {
    *("KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "AUTH", "AUTHORIZATION"),
    *("CREDENTIAL", "CREDENTIALS", "HEADER", "HEADERS", "COOKIE"),
}  # as words of a variable's name
_PATH = re.compile(r"(?<![\w./])(?:/|[A-Za-z]:\\|~/)[^\s\"'<>:,;()\[\]{}]+")


def redacted(text: str) -> str:
    """`text` without what this process was given by its environment and its command line, and without paths, of which
    those of Python files keep their last parts. It runs where something was raised, never in the course of a step."""
    return _PATH.sub(lambda match: _shortened(match[0]), _without(_given(), without_secrets(text)))


def without_secrets(text: str) -> str:
    """`text` without the values of variables whose names say that they are secret: for this process's own log."""
    return _without(_secrets(), text)


def _without(given: Iterator[tuple[str, str]], text: str) -> str:
    for value, name in sorted(given, key=lambda pair: -len(pair[0])):
        text = text.replace(value, name)
    return text


def _secrets() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if not _SECRET.isdisjoint(name.upper().split("_")):
            # Also in parts: of a header the error may show the value alone.
            yield from ((part, f"<{name}>") for part in {value, *re.split(r"[,=;\s]+", value)} if len(part) >= 4)


def _given() -> Iterator[tuple[str, str]]:
    yield from ((value, f"<{name}>") for name, value in os.environ.items() if _tells(value))
    for word in sys.argv[1:]:
        yield from ((part, "<argument>") for part in {word, word.partition("=")[2]} if _tells(part))


def _tells(value: str) -> bool:
    """Whether a value can be told from the words of which code and messages are made. Paths are looked for apart."""
    if len(value) < 8 or "/" in value or re.fullmatch(r"[A-Za-z_.\-]+", value):
        return False
    return not value.isidentifier() or sum(map(str.isdigit, value)) > 3


def _shortened(path: str) -> str:
    return "/".join(re.split(r"[/\\]", path)[-3:]) if path.endswith(".py") else "<path>"
