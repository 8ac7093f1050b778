"""What is said of an exception, and what is taken out of the texts that this package writes.

The text of an exception may hold whatever the program put into it: paths, data, secrets. So an exception leaves as its
type and the names and line numbers of its stack, and with its text only where the user asks for that. What the process
was told in confidence is taken out even then, as far as it can be told.
"""

from __future__ import annotations

import builtins
import functools
import logging
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote

with_text = False
"""Whether the text of exceptions is told, too; see MEGATRON_OTEL_EXCEPTION_TEXT."""

_MAX_TEXT = 32_768  # characters of an error's message, and of its stack trace: collectors refuse large batches
_MARGIN = 8_192  # more than that are looked at, since a secret that is cut in two is not found
_MAX_FRAMES = 50  # from either end of a stack
_MAX_ERRORS = 20  # of a chain, and of a group

# In the name of a variable, a flag or a key.
_SECRET = re.compile(
    r"pass(?:w|ph|code|key|(?![a-z]))|pwd|secret|token(?!i|s(?![a-z]))|keys?(?![a-z])|cred|auth(?!or(?!iz))|cookie|header"
    r"|dsn|private|salt|jwt|bearer|signature|webhook|(?<![a-z])(?:pw|pin|sas|sig|session)(?![a-z])",
    re.IGNORECASE,
)
_NO_SECRET = {"PWD", "OLDPWD"}
_QUOTED = r"(?:\w{0,20}[(\[{])?[bru]?(?:\"(?:[^\"]|(?<=\\)\")*\"?|'(?:[^']|(?<=\\)')*'?)"
_VALUE = (
    rf"{_QUOTED}"
    r"|(?:(?:token|bearer|basic|digest)\s+)?[^\s,;&\"'(){}\[\]]+"
)
_KEY = rf"(?i)(?P<key>(?<![\w.\-])(?=[\w.\-]{{0,100}}?(?:{_SECRET.pattern}))[\w.\-]{{1,200}})"
_KEY_AND_VALUE = re.compile(rf"{_KEY}(?P<between>[\"']?\s*(?:=>|[=:])(?:\s|\\[nrt])*)(?P<value>{_VALUE})")
_FLAG_AND_VALUE = re.compile(rf"{_KEY.replace('?P<key>', '?P<key>(?=-)')}(?P<between>\s+)(?P<value>{_VALUE})")
# A key and its value beside each other: of an argument list, a header's pair, a Kubernetes variable, an XML element.
_VALUE_OF = r"(?:[\"']?value[\"']?\s{0,9}[:=]\s{0,9})"
_BESIDE = tuple(
    re.compile(rf"{_KEY}(?P<between>{between})(?P<value>{value})")
    for between, value in (
        (rf"[\"']?\s{{0,9}}[,(]\s{{0,9}}{_VALUE_OF}?", _QUOTED),
        (rf"[\"']?(?:\s|\\[nrt]){{1,9}}{_VALUE_OF}", r"[^\s\"']+"),
        (r">", r"[^<\n]+(?=</)"),
    )
)
_REST_OF_LINE = re.compile(
    r"(?P<key>\b(?:authorization|cookie))(?P<between>[\"']?\s{0,9}[=:]\s{0,9}[\"']?)(?P<value>[^\n\"']+)", re.IGNORECASE
)
_USER = re.compile(
    r"(?P<key>(?<![\w\-])(?:-u|--(?:proxy-)?user))(?P<between>[\s=]{1,9}|[\"']\s{0,9},\s{0,9}[\"'])(?P<value>[^\s\"':]+:[^\s\"']+)"
)
_IN_URL = re.compile(r"(?<=://)(?P<value>[^\s\"'<>]{1,1000})@")
_AFTER_SCHEME = re.compile(
    r"(?P<key>\b(?:bearer|basic|digest))(?P<between>\s+)(?P<value>[\w+/=.~\-]{4,})", re.IGNORECASE
)
_TOKEN = re.compile(
    r"\b(?:eyJ|[spr]k[-_]|gh[a-z]_|github_pat_|glpat-|hf_|AKIA|ASIA|AIza|ya29\.|xox[a-z]-|npm_|pypi-|nvapi-|SG\.|hvs\.|dt0\w\d\d\.)"
    r"[\w.+/=\-]{8,}"
    r"|(?<=hooks\.slack\.com/services/)\S+"
    # Of a run of such characters each is looked at once: nobody waits for this who raises an error of 40,000 of them.
    r"|(?<![\w+/=\-.])(?=[\w+/=\-]*\d)(?=[\w+/=\-]*[A-Za-z])[\w+/=\-]{32,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.DOTALL)
_PATH = re.compile(r"(?<![\w./])(?:/|[A-Za-z]:\\|~/)[^\s\"'<>:,;()\[\]{}]+")
_BETWEEN = re.compile(r"[\s,;=&:@/?#|\"'(){}\[\]<>\\]+")
_NAME = re.compile(r"[\w.<>]{1,200}")


# ---------------------------------------------------------------------------------------------------- exceptions


def type_name(error: BaseException) -> str:
    """The name of its class, with the module where that is not Python's own."""
    kind = type(error)
    # Not by the attributes: a metaclass may have made them anything.
    module, name = (type.__dict__[what].__get__(kind) for what in ("__module__", "__qualname__"))
    return _name(name if module == "builtins" else f"{module}.{name}")


def described(error: BaseException) -> dict[str, str]:
    """The attributes of a span's event of the name `exception`."""
    attributes = {"exception.type": type_name(error), "exception.stacktrace": stack(error)}
    if with_text:
        message = _text(error)
        attributes["exception.message"] = _cut(redacted(message[: _MAX_TEXT + _MARGIN]), len(message))
        full = _full(error)
        attributes["exception.stacktrace"] = _cut(redacted(full[-_MAX_TEXT - _MARGIN :])[::-1], len(full))[::-1]
    return attributes


def stack(error: BaseException) -> str:
    """As Python prints it, with modules in place of files, and neither texts nor lines of source."""
    lines: list[str] = []
    for of, before in reversed(list(_chain(error))):
        lines += ["Traceback (most recent call last):", *_frames(_own("__traceback__", of)), type_name(of)]
        lines += [f"  + {type_name(member)}" for member in _members(of)]
        lines += ["", before, ""] if before else []
    return without_secrets("\n".join(lines))[-_MAX_TEXT:]


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """The error, what it was raised from, and so on; each with the words that lead on to the one before."""
    at: BaseException | None = error
    seen: set[int] = set()
    words = ""
    while at is not None and id(at) not in seen and len(seen) < _MAX_ERRORS:
        seen.add(id(at))
        yield at, words
        words = "The above exception was the direct cause of the following exception:"
        cause = _own("__cause__", at)
        if cause is None:
            words = "During handling of the above exception, another exception occurred:"
            cause = None if _own("__suppress_context__", at) else _own("__context__", at)
        at = cause


def _members(error: BaseException) -> list[BaseException]:
    """Of a group, and of the groups in it."""
    group: Any = getattr(builtins, "BaseExceptionGroup", None)  # from Python 3.11 on
    found: list[BaseException] = []
    waiting = deque([error])
    while group is not None and waiting and len(found) < _MAX_ERRORS:
        if issubclass(type(at := waiting.popleft()), group):
            members = group.exceptions.__get__(at)[:_MAX_ERRORS]
            found += members
            waiting.extend(members)
    return found[:_MAX_ERRORS]


def _frames(at: TracebackType | None) -> Iterator[str]:
    first: list[TracebackType] = []
    last: deque[TracebackType] = deque(maxlen=_MAX_FRAMES)
    left_out = 0
    while at is not None:
        if len(first) < _MAX_FRAMES:
            first.append(at)
        else:
            left_out += len(last) == _MAX_FRAMES
            last.append(at)
        at = at.tb_next
    for part in (first, last):
        if part is last and left_out:
            yield f"  [{left_out} more]"
        for entry in part:
            code = entry.tb_frame.f_code
            module = _name(entry.tb_frame.f_globals.get("__name__"))
            yield f'  File "{module}", line {entry.tb_lineno}, in {_name(getattr(code, "co_qualname", code.co_name))}'


def _own(name: str, error: BaseException) -> Any:
    """An attribute as Python has it, whatever the error's class makes of its name."""
    return BaseException.__dict__[name].__get__(error)


def _name(value: Any) -> str:
    """`value` if it is made like a name; whoever makes one at run time may put anything into it."""
    return value if type(value) is str and _NAME.fullmatch(value) else "<unnamed>"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        return "<its text could not be had>"


def _full(error: BaseException) -> str:
    if len(list(_chain(error))) == _MAX_ERRORS:
        return stack(error)  # Python would write all of the chain
    try:
        lines = traceback.format_exception(type(error), error, _own("__traceback__", error), limit=-2 * _MAX_FRAMES)
        return "".join(lines)
    except Exception:  # noqa: BLE001
        return stack(error)


def _cut(text: str, length: int) -> str:
    """The beginning of `text`, of which there were `length` characters; the last may be part of a secret."""
    return text[:_MAX_TEXT] if length <= _MAX_TEXT + _MARGIN else text[:-_MARGIN][:_MAX_TEXT]


# ---------------------------------------------------------------------------------------------------- texts


def redacted(text: str) -> str:
    """`text` without secrets, without what this process was given by its environment and its command line, and without
    paths, of which those of Python files keep their last parts."""
    text = _without(_given(), without_secrets(text))
    return _PATH.sub(lambda match: _shortened(match[0]), text)


def without_secrets(text: str) -> str:
    """`text` without the secrets that this process was given, and without what is written as secrets are."""
    text = _PRIVATE_KEY.sub("<private key>", _without(_secrets(), text))
    text = _IN_URL.sub("<credentials>@", text)
    text = _TOKEN.sub("<token>", text)
    text = _AFTER_SCHEME.sub(r"\g<key>\g<between><credentials>", text)
    for pattern in (_REST_OF_LINE, _USER):
        text = pattern.sub(r"\g<key>\g<between><credentials>", text)
    for pattern in (*_BESIDE, _KEY_AND_VALUE, _FLAG_AND_VALUE):
        text = pattern.sub(_without_value, text)
    return text


def _without_value(match: re.Match[str]) -> str:
    return f"{match['key']}{match['between']}<secret>" if _SECRET.search(match["key"]) else match[0]


def _without(given: Iterable[tuple[str, str]], text: str) -> str:
    for value, name in sorted(set(given), key=lambda pair: (-len(pair[0]), pair)):
        text = text.replace(value, f"<{name}>")
    return text


def _told_by_name() -> Iterator[tuple[str, str]]:
    """The variables and the words of the command line, each with its name."""
    yield from os.environ.items()
    for words in (sys.argv[1:], sys.orig_argv[1:]):
        for word, following in zip(words, [*words[1:], ""], strict=False):
            name, equals, value = word.partition("=")
            if equals:
                yield name.lstrip("-"), value
            elif word.startswith("-") and not following.startswith("-"):
                yield word.lstrip("-"), following
            yield "argument", word


@functools.lru_cache(4096)
def _inside(value: str) -> tuple[str, ...]:
    """What is written in a variable, or a word of the command line, as secrets are."""
    found = [match["value"] for pattern in (_IN_URL, _AFTER_SCHEME) for match in pattern.finditer(value)]
    found += [match[0] for match in _PRIVATE_KEY.finditer(value)]
    for pattern in (*_BESIDE, _KEY_AND_VALUE):
        found += [match["value"] for match in pattern.finditer(value) if _SECRET.search(match["key"])]
    return tuple(found)


def _secrets() -> Iterator[tuple[str, str]]:
    for name, value in _told_by_name():
        label = name if _NAME.fullmatch(name) else "argument"
        inside = list(_inside(value))
        if _SECRET.search(name) and name not in _NO_SECRET and not value.startswith(("/", "~/")):
            inside.append(value)
        for secret in inside:
            # Also in parts: of a header the error may show the value alone, and of a text one line.
            for part in {secret, secret.strip("\"'"), *_BETWEEN.split(secret), *_BETWEEN.split(unquote(secret))}:
                if len(part) >= 4 and part.lower() not in _WORDS:
                    yield from ((form, label) for form in _forms(part))


_WORDS = {"true", "false", "none", "null", "auto", "default"}


def _given() -> Iterator[tuple[str, str]]:
    for name, value in _told_by_name():
        if _tells(value):
            label = name if _NAME.fullmatch(name) and name != "argument" else "argument"
            yield from ((form, label) for form in _forms(value))


def _forms(value: str) -> set[str]:
    """How a text may show it."""
    return {value, repr(value)[1:-1], quote(value, safe=""), unquote(value)}


def _tells(value: str) -> bool:
    """Whether a value can be told from the words and numbers of which code and messages are made."""
    if len(value) < 6 or value.endswith(".py") or value.startswith("-"):
        return False
    return not re.fullmatch(r"[A-Za-z_.\-]{1,20}|[\d.,eE+\-]{1,12}", value)


def _shortened(path: str) -> str:
    return "/".join(re.split(r"[/\\]", path)[-3:]) if path.endswith(".py") else "<path>"


# ---------------------------------------------------------------------------------------------------- our own log

_LEFT_OUT = "MEGATRON_OTEL_EXCEPTION_TEXT=1 shows the text"


class _Redacting(logging.Filter):
    """Takes secrets out of a record, and the text out of its exception, before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            record.msg, record.args = without_secrets(record.getMessage()), ()
            if record.exc_info and (error := record.exc_info[1]) is not None:
                shown = without_secrets(_full(error)) if with_text else f"{stack(error)} ({_LEFT_OUT})"
                record.exc_text = shown.rstrip("\n")
        except Exception:  # noqa: BLE001
            record.msg, record.args = "A message could not be written.", ()
        record.exc_info = None
        return True


_redacting = _Redacting()


def get_logger(name: str) -> logging.Logger:
    """The logger for the module `name` of this package."""
    made = logging.getLogger(name)
    made.addFilter(_redacting)  # of each: a parent's filter doesn't see what its children log
    return made
