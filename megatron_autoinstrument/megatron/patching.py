"""Replaces functions of Megatron by wrappers, and puts every one of them back.

A seam names a function. The ledger remembers what each seam replaced, so that a half-done install, and uninstall,
restore exactly that. Wrappers are plain functions: Megatron deep-copies, pickles and inspects what it is given.
Others patch Megatron too, perhaps later: calls that come a few times in a run have all seams looked at again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from threading import get_ident
from types import FunctionType, MethodWrapperType, ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import wrapt

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.megatron import torch_state

_logger = get_logger(__name__)

Arguments = tuple[Any, ...]
Function = Callable[..., Any]

reraise_internal_errors = False
"""Set by this package's own tests, so that no fault of ours hides behind the guard."""


@dataclass(frozen=True, eq=False, slots=True)  # the fields of a named tuple take many times longer to read
class Hook:
    """What a wrapper runs around the original.

    `begin(args, kwargs)` returns a token, or None when this call is of no interest. `end(token, result, error)` gets
    that token and what the original returned or raised.
    """

    begin: Callable[[Arguments, Mapping[str, Any]], Any]
    end: Callable[[Any, Any, BaseException | None], None] = lambda token, result, error: None


@dataclass(frozen=True, eq=False)
class Seam:
    """A function of Megatron to wrap.

    Attributes:
        module: The module whose import makes the function available.
        path: Where it is in that module, such as "train_step" or "P2PCommunicator.recv_forward".
        groups: The span groups that need it. It is left alone unless one of them is on.
        hook: Makes the hook for an original function; given what `install` was told to give, a `Recorder`.
        home: The module that defines the function, where that is another one.
        unless: Another path in the module, or in the module before a colon. Where it exists, it takes this function's
            place, which is left alone.
        optional: Whether it is no news that a version of Megatron lacks it.
        looks: Which of its calls have all seams looked at before they run: what was replaced by then is wrapped anew.
            "first" is the first call of any such seam since `install` or since an "always".
        lost: Called where this function's calls are not seen, with what the hook is given: others depend on having
            seen them all.
    """

    module: str
    path: str
    groups: Set[str]
    hook: Callable[[Function, Any], Hook]
    home: str | None = None
    unless: str | None = None
    optional: bool = False
    looks: Literal["never", "first", "always"] = "never"
    lost: Callable[[Any], None] | None = None


_wrappers: weakref.WeakSet[Function] = weakref.WeakSet()
"""All that were made, by any ledger."""


class _Patch:
    """One wrapper, made once for a seam and an original and kept for the life of the process: references to it
    outlive uninstall, pass through meanwhile, and come alive again on the next install."""

    __slots__ = ("failed", "given", "hook", "original", "plain", "seam", "wrapper")

    def __init__(self, seam: Seam, original: Function, bind: bool = False) -> None:
        self.seam = seam
        self.original = original
        self.plain: Hook | None = None  # the seam's own
        self.hook: Hook | None = None  # what runs: that, and perhaps more around it
        self.failed = False
        self.given: Any = None
        self.wrapper = _wrap(self, original, _binding(original) if bind else original)
        _wrappers.add(self.wrapper)

    def __reduce__(self) -> tuple[Any, ...]:
        # A wrapper that is pickled by value passes through where it arrives, also where this package is not installed.
        return SimpleNamespace, (), {"hook": None}

    def turn_off(self) -> None:
        """Called from an except clause: our own failure costs the user this one seam and one message."""
        if reraise_internal_errors:
            raise
        self.hook = None
        self.failed = True
        _logger.warning(
            "Recording of %s.%s failed and is off from here on; training goes on. Please report this.",
            self.seam.module,
            self.seam.path,
            exc_info=True,
        )
        if self.seam.lost is not None:
            self.seam.lost(self.given)


def _binding(method: Any) -> Function:
    """What calls `method`, a descriptor of another make than a function, as Python does: bound. By that, one of wrapt's
    can tell its wrapper the instance."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method.__get__(args[0], type(args[0]))(*args[1:], **kwargs)

    return call


def _wrap(patch: _Patch, original: Function, call: Function) -> Function:
    """A function that answers as `original` does, but for what no other function can: its identity, `__code__` with
    its file, and `__closure__`.

    Args:
        patch: Which runs a hook around it.
        original: The function.
        call: What calls it.
    """
    # All that its code names is in its closure: its globals are the original's, and it may be pickled by value.
    is_compiling, ordinary, any_error = torch_state.is_compiling(), Exception, BaseException

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # First of all: torch.compile would trace the rest, and fail or record its own tracing.
        if is_compiling() or (hook := patch.hook) is None:
            return call(*args, **kwargs)
        try:
            token = hook.begin(args, kwargs)
        except ordinary:
            token = None
            patch.turn_off()
        if token is None:
            return call(*args, **kwargs)
        try:
            result = call(*args, **kwargs)
        except any_error as error:
            try:
                hook.end(token, None, error)
            except ordinary:
                patch.turn_off()
            raise
        try:
            hook.end(token, result, None)
        except ordinary:
            patch.turn_off()
        return result

    made: Any = wrapper
    if isinstance(original, FunctionType):
        made = FunctionType(wrapper.__code__, original.__globals__, original.__name__, None, wrapper.__closure__)
        # To a call of `*args, **kwargs` these make no difference.
        made.__defaults__, made.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    functools.update_wrapper(made, original, updated=())
    # A marker of torch's would make dynamo skip the wrapper.
    own = getattr(original, "__dict__", {}).items()  # what is written in C has none
    own = {name: value for name, value in own if not name.startswith("_torchdynamo")}
    vars(made).update({**own, "__wrapped__": original})
    with contextlib.suppress(Exception):
        made.__signature__ = inspect.signature(original)  # inspect.getfullargspec doesn't ask `__wrapped__`
    return made


def _once(hook: Hook, running: set[int]) -> Hook:
    """`hook` for a seam of which several wrappers are in place: of those that call each other, the outermost counts.

    Args:
        hook: The hook.
        running: The threads in which one of the seam's wrappers runs.
    """

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[int, Any] | None:
        thread = get_ident()
        if thread in running:
            return None
        running.add(thread)
        try:
            return thread, hook.begin(args, kwargs)
        except BaseException:
            running.discard(thread)
            raise

    def end(token: tuple[int, Any], result: Any, error: BaseException | None) -> None:
        thread, inner = token
        running.discard(thread)
        if inner is not None:
            hook.end(inner, result, error)

    return Hook(begin, end)


class _Replacement(NamedTuple):
    seam: Seam
    holder: Any  # a module or a class
    name: str
    original: Any  # as inspect.getattr_static gives it: a static or class method stays one
    replacement: Any
    inherited: bool  # the holder had no such attribute of its own


def _can_wrap(holder: Any, original: Any) -> bool:
    """Whether a plain function may stand in for `original`. In a class it would bind `self`, so that only what does
    so itself will do: not a partial. It has no methods, as an object with `__call__` may, and of a generator or a
    coroutine it would see the creation alone."""
    function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
    if any(test(function) for test in _RUNNING_LATER):
        return False
    if inspect.isclass(holder):
        return isinstance(original, (FunctionType, staticmethod, classmethod))
    # Of a method-wrapper, such as `[].__len__`, Python 3.10 says that it is no routine.
    return callable(original) and (
        inspect.isroutine(original) or isinstance(original, (functools.partial, MethodWrapperType))
    )


_RUNNING_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _exists(module: ModuleType, path: str) -> bool:
    """Whether a seam's `unless` does. It counts as existing where it can't be told: its module isn't ready."""
    elsewhere, _, path = path.rpartition(":")
    holders, _, name = path.rpartition(".")
    holder: Any = sys.modules.get(elsewhere) if elsewhere else module
    for part in filter(None, holders.split(".")):
        holder = getattr(holder, part, None)
    return holder is None or hasattr(holder, name)


def _is_importing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class Patcher:
    """Everything of Megatron that is replaced now. One thread at a time installs, looks and uninstalls; beside it
    another may import."""

    def __init__(
        self, in_turn: Callable[[Callable[[], None]], None] = lambda look: look(), beside: Patcher | None = None
    ) -> None:
        """
        Args:
            in_turn: Runs what a call of Megatron asks for, when nobody else installs or uninstalls.
            beside: Another one, whose names are looked for together with this one's: to go through all modules takes
                longer than all else.
        """
        self._in_turn = in_turn
        self._beside = beside
        self._patches: dict[tuple[Seam, int], _Patch] = {}
        self._replacements: list[_Replacement] = []
        self.groups: frozenset[str] = frozenset()
        """Those whose seams are wrapped now."""
        self._given: Any = None
        self._wanted: dict[str, list[Seam]] = {}
        self._watched: set[str] = set()  # wrapt's hooks can't be taken back, so each is set once
        self._named: set[Seam] = set()  # those of which it was said that they can't be recorded
        self._running: dict[Seam, set[int]] = {}  # of those with several wrappers: the threads in one of them
        self._first_is_due = False

    def install(self, seams: Iterable[Seam], groups: frozenset[str], given: Any = None, rebind: bool = True) -> None:
        """Wraps the seams of `groups`: now where their module is loaded, else when it is imported.

        Args:
            seams: The seams.
            groups: The groups.
            given: What the hooks are given: what they record with.
            rebind: Whether to look for names that are bound to what was replaced.

        Raises:
            Exception: something went wrong that is no missing seam; nothing stays replaced then.
        """
        self.groups, self._given = groups, given
        self._first_is_due = True
        for seam in seams:
            if not groups.isdisjoint(seam.groups):
                self._wanted.setdefault(seam.module, []).append(seam)
        try:
            loaded = {name: module for name in self._wanted if (module := sys.modules.get(name)) is not None}
            for name, module in loaded.items():
                self._patch_module(name, module)
            if rebind and (loaded or self._others()):
                self._rebind_to_wrappers()
            for name in self._wanted.keys() - sys.modules.keys() - self._watched:
                self._watched.add(name)
                wrapt.register_post_import_hook(self._on_import, name)
        except BaseException:
            self.uninstall()
            raise

    def look(self, called: Seam | None = None) -> None:
        """Wraps what was put in the place of a seam's function since `install`.

        Args:
            called: The seam whose function is about to run, as it was before.
        """
        before = len(self._replacements)
        for name in list(self._wanted):
            module = sys.modules.get(name)
            if module is not None and not _is_importing(module):
                self._patch_module(name, module)
        found = self._replacements[before:]
        if found or (called is not None and called.looks == "always"):  # names may have been bound in the meantime
            self._rebind_to_wrappers()
        if found:
            _name_running([at for at in found if at.seam is not called])

    def uninstall(self, rebind: bool = True) -> None:
        """Puts back every original.

        Args:
            rebind: Whether to do so in names, too, that were bound to a wrapper meanwhile.
        """
        self.silence()
        while self._replacements:
            _, holder, name, original, replacement, inherited = self._replacements.pop()
            if vars(holder).get(name) is not replacement:
                continue  # somebody wrapped on top of us: theirs stays, ours passes through
            if inherited:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        if rebind:
            beside = [patch for patch in self._others() if patch.hook is None]
            self._rebind({id(patch.wrapper): _Rebinding(patch.original) for patch in [*self._made(), *beside]})

    def silence(self) -> None:
        """Makes every wrapper pass through, and leaves it in place."""
        self._wanted.clear()
        self.groups = frozenset()
        for patch in list(self._patches.values()):  # a guard calls this, so that it calls nothing of ours
            patch.hook = None
            patch.failed = False

    def _on_import(self, module: ModuleType) -> None:
        # Runs inside the application's import statement.
        try:
            seams = self._wanted.get(module.__name__, ())
            self._patch_module(module.__name__, module)
            if any(seam.home for seam in seams):
                self._rebind_to_wrappers()
            if seams and not self._wanted:
                self.uninstall()  # as another thread has meanwhile
        except Exception:
            if reraise_internal_errors:
                raise
            _logger.warning("Could not instrument %s; nothing is recorded.", module.__name__, exc_info=True)
            self.uninstall()

    def _patch_module(self, module_name: str, module: ModuleType) -> None:
        for seam in list(self._wanted.get(module_name, ())):
            if seam.unless is not None and _exists(module, seam.unless):
                continue
            try:
                holder, name, original = wrapt.resolve_path(module, seam.path)
            except AttributeError:
                if not seam.optional and not _is_importing(module):
                    what = "This Megatron has no %s.%s that we know: nothing is recorded of it."
                    self._miss(seam, logging.INFO, what)
                continue
            if not _can_wrap(holder, original):
                what = f"%s.%s is no function but {type(original).__name__}: nothing is recorded of it."
                if any(test(original) for test in _RUNNING_LATER):
                    what = "%s.%s is a generator or a coroutine: nothing is recorded of it."
                self._miss(seam, logging.WARNING, what)
                continue
            if name not in vars(holder) and any(original is patch.wrapper for patch in self._made()):
                continue  # inherited from a class that we have wrapped
            self._replace(seam, holder, name, original)

    def _miss(self, seam: Seam, level: int, message: str, exc_info: bool = False) -> None:
        if seam not in self._named:
            self._named.add(seam)
            _logger.log(level, message, seam.module, seam.path, exc_info=exc_info)
        if seam.lost is not None:
            seam.lost(self._given)

    def _replace(self, seam: Seam, holder: Any, name: str, original: Any) -> None:
        kind = type(original) if isinstance(original, (staticmethod, classmethod)) else None
        function = original.__func__ if kind else original
        binds = kind is None or (kind is classmethod and sys.version_info < (3, 13))  # from there on it calls plainly
        bind = inspect.isclass(holder) and binds and type(function) is not FunctionType
        patch = self._patch_for(seam, function, bind)
        if patch.hook is None and not patch.failed and not self._bring_alive(patch):
            return
        if function is not patch.wrapper and function is not patch.original:
            # A wrapper of this seam is below that of somebody, who may call it now and then only, or never.
            if patch.failed or function in _wrappers:  # another ledger's always calls it
                return
            patch = _Patch(seam, function, bind)
            if not self._bring_alive(patch):
                return
        if function is patch.wrapper:
            # It is in place, or was put back there by somebody.
            ours = ((at.holder, at.name, at.replacement) for at in self._replacements)
            if not any(at is holder and of == name and what is original for at, of, what in ours):
                below = kind(patch.original) if kind else patch.original
                self._replacements.append(_Replacement(seam, holder, name, below, original, inherited=False))
            return
        inherited = name not in vars(holder)
        if inherited and inspect.isclass(holder):
            # By the name of the base class's function, pickle would find that one.
            patch.wrapper.__module__ = holder.__module__
            patch.wrapper.__qualname__ = f"{holder.__qualname__}.{name}"
        replacement = kind(patch.wrapper) if kind else patch.wrapper
        self._replacements.append(_Replacement(seam, holder, name, original, replacement, inherited))
        setattr(holder, name, replacement)

    def _bring_alive(self, patch: _Patch) -> bool:
        """Whether that could be done."""
        seam, known = patch.seam, self._of(patch.seam)
        try:
            name = seam.path.rpartition(".")[2]
            patch.plain = seam.hook(_readable(patch.original, name, [other.original for other in known]), self._given)
            patch.given = self._given
        except Exception:
            # A fork's function that we can't read costs its own spans, and no others.
            if reraise_internal_errors:
                raise
            self._miss(seam, logging.WARNING, "Could not instrument %s.%s: its spans are left out.", exc_info=True)
            return False
        self._patches[seam, id(patch.original)] = patch
        patch.hook = self._around(patch)
        for other in known:
            if other.hook is not None:
                other.hook = self._around(other)
        return True

    def _around(self, patch: _Patch) -> Hook | None:
        """The hook to run for `patch`: its own, and around that what all of them have."""
        seam, hook = patch.seam, patch.plain
        if hook is None:
            return None
        if len(self._of(seam)) > 1:
            hook = _once(hook, self._running.setdefault(seam, set()))
        if seam.looks == "always" or (seam.looks == "first" and self._first_is_due):
            hook = self._looking(seam, hook)
        return hook

    def _looking(self, seam: Seam, hook: Hook) -> Hook:
        always = seam.looks == "always"

        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
            self._first_is_due = always
            for patch in self._made():
                if patch.seam.looks == "first" and patch.hook is not None:
                    patch.hook = self._around(patch)
            for other, running in self._running.items():
                if always and other is not seam:
                    running.clear()  # a restart in the process may have left anything behind
            self._in_turn(lambda: self.look(seam))
            return hook.begin(args, kwargs)

        return Hook(begin, hook.end)

    def _patch_for(self, seam: Seam, function: Function, bind: bool) -> _Patch:
        """The patch made for `function` before, or one of `seam` whose wrapper `function` calls; else a new one."""
        if (patch := self._patches.get((seam, id(function)))) is not None:
            return patch
        ours = {id(patch.wrapper): patch for patch in self._of(seam)}
        below: Any = function
        for _ in range(100):  # a chain may be a circle
            if below is None:
                break
            if id(below) in ours:
                return ours[id(below)]
            below = _called_by(below)
        return _Patch(seam, function, bind)

    def _of(self, seam: Seam) -> list[_Patch]:
        return [patch for patch in self._made() if patch.seam is seam]

    def _made(self) -> list[_Patch]:
        return list(self._patches.values())  # a copy: a thread that imports may add to it

    def _others(self) -> list[_Patch]:
        return [] if self._beside is None else self._beside._made()

    def _rebind_to_wrappers(self) -> None:
        made = [patch for patch in [*self._made(), *self._others()] if patch.hook is not None]
        self._rebind({id(patch.original): _Rebinding(patch.wrapper, _name_of(patch)) for patch in made})

    def _rebind(self, new: Mapping[int, _Rebinding]) -> None:
        homes = {patch.seam.home for patch in self._made() if patch.seam.home}
        _rebind(new, {home.rsplit(".", depth)[0] for home in homes for depth in range(home.count(".") + 1)})


# They bind nothing of Megatron's, and are three quarters of all that is loaded.
_APART = sys.stdlib_module_names | {"torch", "torchgen", "functorch", "sympy", "mpmath", "numpy", "scipy", "triton"}


class _Rebinding(NamedTuple):
    function: Any
    name: str | None = None
    """The only name that gets it, and in no module that defines what has it; None: all."""


def _name_of(patch: _Patch) -> str | None:
    """None for a function of Megatron's. What somebody has put in its place may be one that a program uses for other
    things too, which are no calls of the seam: it is one where it is called by the seam's name."""
    seam, home = patch.seam, str(getattr(patch.original, "__module__", None))
    if home in (seam.module, seam.home) or home.startswith("megatron."):
        return None
    return seam.path.rpartition(".")[2]


def _rebind(new: Mapping[int, _Rebinding], also: Set[str]) -> None:
    """Gives the names that any loaded module has made by `from X import f` the function that X has now.

    Args:
        new: The functions, by the ids of what they replace.
        also: Modules to look at although they are of packages that bind nothing of Megatron's.
    """
    ids = set(new)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _APART and name not in also:
            continue
        # Whatever else is asked of a lazy module loads it.
        if not issubclass(type(module), ModuleType):
            continue
        namespace = object.__getattribute__(module, "__dict__")
        if ids.isdisjoint(map(id, list(namespace.values()))):  # a tenth of the time of a loop
            continue
        for bound, value in list(namespace.items()):
            if (to := new.get(id(value))) is not None:
                elsewhere = name != getattr(value, "__module__", None)
                if to.name is None or (to.name == bound and elsewhere):
                    namespace[bound] = to.function


def _name_running(found: list[_Replacement]) -> None:
    """Says which of these originals this thread is in the middle of."""
    codes = {getattr(at.original, "__code__", None): at.seam for at in found}
    frame: Any = sys._getframe()
    while frame is not None:
        if (seam := codes.get(frame.f_code)) is not None:
            _logger.warning(
                "%s.%s was replaced right before this call of it, which is not recorded.", seam.module, seam.path
            )
        frame = frame.f_back


def _called_by(function: Any) -> Any:
    """The function that `function` wraps, or None: it may have taken but the name, as by `functools.wraps`."""
    below = getattr(function, "__wrapped__", None)
    if type(function) is not FunctionType:
        return below
    held = [*_closure(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [function.__globals__.get(name) for name in function.__code__.co_names]
    return below if any(value is below for value in held) else None


def _closure(function: Any) -> list[Any]:
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            found.append(cell.cell_contents)
    return found


def _readable(function: Function, name: str, known: list[Function]) -> Function:
    """The function whose parameters are those of a call of `function`: where that passes on whatever it is called
    with, the one of its name that it closes over, else one that was in its place before."""
    candidates = [function, *known]
    for one in candidates:
        if not _passes_on(one):
            return one
        inside = [value for value in _closure(one) if isinstance(value, FunctionType)]
        candidates += [value for value in inside if value.__name__ == name or _passes_on(value)][
            : max(0, 20 - len(candidates))
        ]
    return function


def _passes_on(function: Function) -> bool:
    try:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError):
        return True
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


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
