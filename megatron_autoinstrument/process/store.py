"""What the ranks of a run agree on with no collective: through the store by which torch.distributed has found them all.

Each question is one round trip to that store, which no other rank has to take part in: a rank that records nothing
knows nothing of it. Training must not wait for it for ever, nor end by it: another thread asks, and whoever needs the
answer waits a bounded time and goes on without one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from megatron_autoinstrument.common.redact import get_logger

_logger = get_logger(__name__)

_PREFIX = "megatron_autoinstrument"
_PATIENCE_S = 5.0

_shared = False  # a forked child has its parent's connection to the store, and would get the answers meant for it
_told = False
_number_on_node: int | None = None


def _store() -> Any | None:
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return None if _shared or torch is None or not is_up() else torch._get_default_store()
    except Exception:  # noqa: BLE001
        return None  # another torch, or process group, which has none


def is_up() -> bool:
    """Whether torch.distributed is initialised, so that a store that isn't there now won't come."""
    torch = sys.modules.get("torch.distributed")
    try:
        return torch is not None and bool(torch.is_initialized())
    except Exception:  # noqa: BLE001
        return False


def _in_child() -> None:
    global _shared
    _shared = _shared or is_up()


os.register_at_fork(after_in_child=_in_child)


def agree(previous: str | None) -> str | None:
    """A random word that all ranks get alike: the first that asks draws it.

    Args:
        previous: The word that this rank has had until now; it is replaced, by whichever rank asks first.

    Returns:
        The word, or None where the store doesn't answer.
    """
    mine = os.urandom(12).hex()

    def ask(store: Any) -> str:
        word = store.compare_set(f"{_PREFIX}.run", previous or "", mine)
        if previous and word == previous.encode():  # this store has none yet
            word = store.compare_set(f"{_PREFIX}.run", "", mine)
        return str(word.decode())

    return _ask(ask)


def number_on_node() -> int | None:
    """The number of this process among those of its machine that have asked, from 0 on; None where nobody answers."""
    global _number_on_node
    if _number_on_node is None:
        number = _ask(lambda store: store.add(f"{_PREFIX}.node.{_machine()}", 1))
        _number_on_node = None if number is None else number - 1
    return _number_on_node


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:  # hosts may all have one name, or a pod each
            return file.read().strip()
    except OSError:
        import socket

        return socket.gethostname()


def _ask(question: Callable[[Any], Any]) -> Any | None:
    global _told
    store = _store()
    if store is None:
        return None
    answers: list[Any] = []
    reason: list[object] = [f"no answer came within {_PATIENCE_S:g} s"]

    def ask() -> None:
        try:
            answers.append(question(store))
        except Exception as error:  # noqa: BLE001
            reason[0] = type(error).__name__

    try:
        thread = threading.Thread(target=ask, name="megatron-autoinstrument", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
    except RuntimeError:
        pass  # the interpreter is ending
    if answers:
        return answers[0]
    if not _told:
        _told = True
        _logger.warning(
            "torch.distributed's store could not be asked (%s): this rank's spans are in traces of their own.",
            reason[0],
        )
    return None
