"""Replaces functions of Megatron by wrappers, and puts every one of them back.

A seam names a function. The ledger remembers what each seam replaced, so that a half-done install, and uninstall,
restore exactly that. Wrappers are plain functions: Megatron deep-copies, pickles and inspects what it is given.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import wrapt

from megatron_autoinstrument import torch_state
from megatron_autoinstrument.redact import get_logger

_logger = get_logger(__name__)

Arguments = tuple[Any, ...]
Function = Callable[..., Any]

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

reraise_internal_errors = False
"""Set by this package's own tests, so that no fault of ours hides behind the guard."""


class Hook(NamedTuple):
    """What a wrapper runs around the original.

    `begin(args, kwargs)` returns a token, or None when this call is of no interest. `end(token, result, error)` gets
    that token and what the original returned or raised.
    """

    begin: Callable[[Arguments, Mapping[str, Any]], Any]
    end: Callable[[Any, Any, BaseException | None], None]


@dataclass(frozen=True, eq=False)
class Seam:
    """A function of Megatron to wrap.

    Attributes:
        module: The module whose import makes the function available.
        path: Where it is in that module, such as "train_step" or "P2PCommunicator.recv_forward".
        groups: The span groups that need it. It is left alone unless one of them is on.
        hook: Makes the hook for an original function; told the groups that are on.
        home: The module that defines the function, where that is another one.
        unless: Another path in the module, or in the module before a colon. Where it exists, it takes this function's
            place, which is left alone.
        optional: Whether it is no news that a version of Megatron lacks it.
    """

    module: str
    path: str
    groups: Set[str]
    hook: Callable[[Function, frozenset[str]], Hook]
    home: str | None = None
    unless: str | None = None
    optional: bool = False


class _Patch:
    """One wrapper, made once for a seam and an original and kept for the life of the process: references to it
    outlive uninstall, pass through meanwhile, and come alive again on the next install."""

    __slots__ = ("hook", "original", "seam", "wrapper")

    def __init__(self, seam: Seam, original: Function) -> None:
        self.seam = seam
        self.original = original
        self.hook: Hook | None = None
        self.wrapper = _wrap(self, original)


def _wrap(patch: _Patch, original: Function) -> Function:
    is_compiling = torch_state.is_compiling()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # First of all: torch.compile would trace the rest, and fail or record its own tracing.
        if is_compiling() or (hook := patch.hook) is None:
            return original(*args, **kwargs)
        try:
            token = hook.begin(args, kwargs)
        except Exception:  # noqa: BLE001
            token = None
            _turn_off(patch)
        if token is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _end(patch, hook, token, None, error)
            raise
        _end(patch, hook, token, result, None)
        return result

    # The original's __dict__ is left out: a marker of torch's in it would make dynamo skip the wrapper.
    return functools.update_wrapper(wrapper, original, updated=())


def _end(patch: _Patch, hook: Hook, token: Any, result: Any, error: BaseException | None) -> None:
    try:
        hook.end(token, result, error)
    except Exception:  # noqa: BLE001
        _turn_off(patch)


def _turn_off(patch: _Patch) -> None:
    """Called from an except clause: our own failure costs the user this one seam and one message."""
    if reraise_internal_errors:
        raise
    patch.hook = None
    _logger.warning(
        "Recording of %s.%s failed and is off from here on; training goes on. Please report this.",
        patch.seam.module,
        patch.seam.path,
        exc_info=True,
    )


class _Replacement(NamedTuple):
    holder: Any  # a module or a class
    name: str
    original: Any  # as inspect.getattr_static gives it: a static or class method stays one
    replacement: Any
    inherited: bool  # the holder had no such attribute of its own


def _can_wrap(holder: Any, original: Any) -> bool:
    """Whether a plain function may stand in for `original`. In a class it would bind `self`, so that only what does
    so itself will do: not a partial, or an object with `__call__`."""
    if inspect.isclass(holder):
        return isinstance(original, (FunctionType, staticmethod, classmethod))
    return callable(original) and not inspect.isclass(original)


def _exists(module: ModuleType, path: str) -> bool:
    """Whether a seam's `unless` does. It counts as existing where it can't be told: its module isn't ready."""
    elsewhere, _, path = path.rpartition(":")
    holders, _, name = path.rpartition(".")
    holder: Any = sys.modules.get(elsewhere) if elsewhere else module
    for part in filter(None, holders.split(".")):
        holder = getattr(holder, part, None)
    return holder is None or hasattr(holder, name)


class Ledger:
    """Everything of Megatron that is replaced now. One thread at a time installs and uninstalls; beside it another
    may import."""

    def __init__(self) -> None:
        self._patches: dict[tuple[Seam, int], _Patch] = {}
        self._replacements: list[_Replacement] = []
        self.groups: frozenset[str] = frozenset()
        """Those whose seams are wrapped now."""
        self._wanted: dict[str, list[Seam]] = {}
        self._watched: set[str] = set()  # wrapt's hooks can't be taken back, so each is set once

    def install(self, seams: Iterable[Seam], groups: frozenset[str]) -> None:
        """Wraps the seams of `groups`: now where their module is loaded, else when it is imported.

        Raises:
            Exception: something went wrong that is no missing seam; nothing stays replaced then.
        """
        self.groups = groups
        for seam in seams:
            if not groups.isdisjoint(seam.groups):
                self._wanted.setdefault(seam.module, []).append(seam)
        try:
            loaded = [module for name in self._wanted if (module := sys.modules.get(name)) is not None]
            for module in loaded:
                self._patch_module(module)
            if loaded:
                self._rebind_to_wrappers()
            for name in self._wanted.keys() - sys.modules.keys() - self._watched:
                self._watched.add(name)
                wrapt.register_post_import_hook(self._on_import, name)
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Puts back every original, also in names that were bound to a wrapper meanwhile."""
        self.silence()
        while self._replacements:
            holder, name, original, replacement, inherited = self._replacements.pop()
            if vars(holder).get(name) is not replacement:
                continue  # somebody wrapped on top of us: theirs stays, ours passes through
            if inherited:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        self._rebind({id(patch.wrapper): patch.original for patch in self._made()})

    def silence(self) -> None:
        """Makes every wrapper pass through, and leaves it in place."""
        self._wanted.clear()
        self.groups = frozenset()
        for patch in list(self._patches.values()):  # a guard calls this, so that it calls nothing of ours
            patch.hook = None

    def _on_import(self, module: ModuleType) -> None:
        # Runs inside the application's import statement.
        try:
            seams = self._wanted.get(module.__name__, ())
            self._patch_module(module)
            if any(seam.home for seam in seams):
                self._rebind_to_wrappers()
            if seams and not self._wanted:
                self.uninstall()  # as another thread has meanwhile
        except Exception:
            if reraise_internal_errors:
                raise
            _logger.warning("Could not instrument %s; nothing is recorded.", module.__name__, exc_info=True)
            self.uninstall()

    def _patch_module(self, module: ModuleType) -> None:
        for seam in self._wanted.get(module.__name__, ()):
            if seam.unless is not None and _exists(module, seam.unless):
                continue
            try:
                holder, name, original = wrapt.resolve_path(module, seam.path)
            except AttributeError:
                holder, name, original = module, seam.path, None
            if seam.optional and original is None:
                continue
            if not _can_wrap(holder, original):
                _logger.info(
                    "This Megatron has no %s.%s that we know: nothing is recorded of it.", seam.module, seam.path
                )
                continue
            if name not in vars(holder) and any(original is patch.wrapper for patch in self._made()):
                continue  # inherited from a class that we have wrapped
            self._replace(seam, holder, name, original)

    def _replace(self, seam: Seam, holder: Any, name: str, original: Any) -> None:
        kind = type(original) if isinstance(original, (staticmethod, classmethod)) else None
        function = original.__func__ if kind else original
        patch = self._patch_for(seam, function)
        try:
            hook = seam.hook(patch.original, self.groups)
        except Exception:
            # A fork's function that we can't read costs its own spans, and no others.
            if reraise_internal_errors:
                raise
            _logger.warning(
                "Could not instrument %s.%s: its spans are left out.", seam.module, seam.path, exc_info=True
            )
            return
        self._patches[seam, id(patch.original)] = patch
        patch.hook = hook
        if patch.original is not function:
            return  # ours is below another's wrapper already
        inherited = name not in vars(holder)
        if inherited and inspect.isclass(holder):
            # By the name of the base class's function, pickle would find that one.
            patch.wrapper.__module__ = holder.__module__
            patch.wrapper.__qualname__ = f"{holder.__qualname__}.{name}"
        replacement = kind(patch.wrapper) if kind else patch.wrapper
        self._replacements.append(_Replacement(holder, name, original, replacement, inherited))
        setattr(holder, name, replacement)

    def _patch_for(self, seam: Seam, function: Function) -> _Patch:
        """The patch made for `function` before, or one of `seam` whose wrapper is below `function`; else a new one."""
        if (patch := self._patches.get((seam, id(function)))) is not None:
            return patch
        ours = {id(patch.wrapper): patch for (of, _), patch in list(self._patches.items()) if of is seam}
        below: Any = function
        for _ in range(100):  # a chain may be a circle
            if below is None:
                break
            if id(below) in ours:
                return ours[id(below)]
            below = getattr(below, "__wrapped__", None)
        return _Patch(seam, function)

    def _made(self) -> list[_Patch]:
        return list(self._patches.values())  # a copy: a thread that imports may add to it

    def _rebind_to_wrappers(self) -> None:
        self._rebind({id(patch.original): patch.wrapper for patch in self._made() if patch.hook is not None})

    def _rebind(self, new: Mapping[int, Any]) -> None:
        """Gives names made by `from X import f` the function that X has now."""
        for module in _namespaces(patch.seam for patch in self._made()):
            namespace = vars(module)
            for name, value in list(namespace.items()):
                if id(value) in new:
                    namespace[name] = new[id(value)]


def _namespaces(seams: Iterable[Seam]) -> list[ModuleType]:
    """The loaded modules that may have bound a seam's function: Megatron's, the user's own, and the packages that
    re-export a function from elsewhere. To scan all modules would take fifteen times as long."""
    homes = {seam.home for seam in seams if seam.home}
    parents = {home.rsplit(".", depth)[0] for home in homes for depth in range(home.count(".") + 1)}
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and (name.partition(".")[0] == "megatron" or name in parents or _is_users(vars(module).get("__file__")))
    ]


def _is_users(file: Any) -> bool:
    return isinstance(file, str) and not file.startswith(_LIBRARIES) and "-packages" not in file


def argument(function: Function, name: str) -> Callable[[Arguments, Mapping[str, Any]], Any]:
    """A reader of the parameter `name` from a call's arguments; it gives None where the call or the function has no
    such parameter. The signature is looked at now, not on each call."""
    parameters = list(inspect.signature(function).parameters.values())
    position, default = sys.maxsize, None
    for index, parameter in enumerate(parameters):
        if parameter.name == name:
            default = None if parameter.default is parameter.empty else parameter.default
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                position = index

    def read(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        return args[position] if position < len(args) else default

    return read
