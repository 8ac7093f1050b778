"""Things that the user may add under a name: by a call, or by an entry point of a package."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and what they stand for: built in, registered, or offered by the entry points of `group`."""

    def __init__(self, group: str, known: dict[str, T]) -> None:
        self._group = group
        self._known = dict(known)

    def register(self, name: str, thing: T) -> None:
        """Adds a name.

        Raises:
            ValueError: the name is empty or taken.
        """
        if not name or name in self._known:
            raise ValueError(f"{name!r} is empty or taken; taken are: {', '.join(sorted(self._known))}.")
        self._known[name] = thing

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in entry_points(group=self._group).names

    def names(self) -> str:
        """All names, for people."""
        return ", ".join([*self._known, *sorted(entry_points(group=self._group).names - self._known.keys())])

    def get(self, name: str) -> T:
        """What `name` stands for.

        Raises:
            KeyError: there is no such name.
        """
        if name not in self._known:
            self._known[name] = entry_points(group=self._group)[name].load()
        return self._known[name]
