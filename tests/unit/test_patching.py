import contextlib
import copy
import functools
import importlib
import inspect
import logging
import multiprocessing
import pickle
import sys
import threading
import types
import typing

import pytest
import wrapt

from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.megatron.patching import Hook, Patcher, Seam

SOURCE = """
def step(model, iteration=None, *, forward_only=False):
    "Trains."
    return model, iteration, forward_only

class Base:
    def inherited(self): return "inherited"

class Communicator(Base):
    def send(self, tensor): return self, tensor
    @staticmethod
    def static(x): return x
    @classmethod
    def cls(cls, x): return cls, x
"""

ALL = frozenset({"on"})


@pytest.fixture
def calls():
    return []


@pytest.fixture
def hook(calls):
    def make(original, groups):
        def begin(args, kwargs):
            calls.append(("begin", original.__name__))
            return "token"

        def end(token, result, error):
            calls.append(("end", original.__name__, error))

        return Hook(begin, end)

    return make


@pytest.fixture
def module(fake_module):
    return fake_module("megatron.fake", SOURCE)


@pytest.fixture
def ledger():
    ledger = Patcher()
    yield ledger
    ledger.uninstall()


def seam(path, hook, module="megatron.fake", **more):
    return Seam(module, path, {"on"}, hook, **more)


def test_a_wrapper_hands_through_arguments_results_and_exceptions(ledger, fake_module, hook, calls):
    module = fake_module("megatron.fake", "def fails(*args, **kwargs):\n    raise KeyError(args, kwargs)" + SOURCE)
    ledger.install([seam("step", hook), seam("fails", hook)], ALL)
    model = object()
    assert module.step(model, 3, forward_only=True) == (model, 3, True)
    with pytest.raises(KeyError) as caught:
        module.fails(1, a=2)
    assert caught.value.args == ((1,), {"a": 2})
    assert calls == [("begin", "step"), ("end", "step", None), ("begin", "fails"), ("end", "fails", caught.value)]


@pytest.mark.parametrize("path", ["step", "Communicator.send", "Communicator.static", "Communicator.cls"])
def test_a_wrapper_behaves_as_its_original_to_copy_pickle_and_inspect(ledger, fake_module, hook, path):
    fake_module("megatron")  # pickle looks for the package first
    module = fake_module("megatron.fake", SOURCE)
    vars(module)["__name__"] = "megatron.fake"
    exec(SOURCE, vars(module))  # again, so that its functions know their module
    get = functools.partial(functools.reduce, getattr, path.split("."))
    original = get(module)
    ledger.install([seam(path, hook)], ALL)
    wrapper = get(module)
    assert inspect.isroutine(wrapper)
    assert type(wrapper) is type(original)
    assert wrapper == get(module)
    assert hash(wrapper) == hash(get(module))
    assert inspect.signature(wrapper) == inspect.signature(original)
    assert (wrapper.__name__, wrapper.__qualname__, wrapper.__module__, wrapper.__doc__) == (
        original.__name__,
        original.__qualname__,
        original.__module__,
        original.__doc__,
    )
    assert copy.deepcopy(wrapper) == wrapper
    assert pickle.loads(pickle.dumps(wrapper)) == wrapper


def test_bound_methods_of_one_object_are_equal_and_can_be_copied_and_pickled(ledger, fake_module, hook):
    fake_module("megatron")  # pickle looks for the package first
    module = fake_module("megatron.fake", SOURCE)
    vars(module)["__name__"] = "megatron.fake"
    exec(SOURCE, vars(module))
    ledger.install([seam("Communicator.send", hook)], ALL)
    communicator = module.Communicator()
    assert communicator.send == communicator.send
    assert communicator.send != module.Communicator().send
    assert copy.deepcopy(communicator.send)(1)[1] == 1
    assert pickle.loads(pickle.dumps(communicator.send))(1)[1] == 1


def test_an_inherited_method_is_pickled_as_the_class_that_it_was_patched_in_has_it(ledger, fake_module, hook, calls):
    fake_module("megatron")
    module = fake_module("megatron.fake", SOURCE)
    vars(module)["__name__"] = "megatron.fake"
    exec(SOURCE, vars(module))
    ledger.install([seam("Communicator.inherited", hook)], ALL)
    assert pickle.loads(pickle.dumps(module.Communicator.inherited)) is module.Communicator.inherited
    ledger.uninstall()
    assert pickle.loads(pickle.dumps(module.Communicator().inherited))() == "inherited"


def test_static_and_class_methods_stay_what_they_are(ledger, module, hook, calls):
    ledger.install([seam("Communicator.static", hook), seam("Communicator.cls", hook)], ALL)
    assert module.Communicator.static(1) == 1
    assert module.Communicator().static(1) == 1
    assert module.Communicator.cls(1) == (module.Communicator, 1)
    assert len(calls) == 6


def test_a_marker_of_torch_on_the_original_is_not_copied_and_other_attributes_are(ledger, module, hook):
    module.step._torchdynamo_orig_callable = object()
    module.step.is_distributed = True
    ledger.install([seam("step", hook)], ALL)
    assert module.step.is_distributed
    assert set(vars(module.step)) == {"__wrapped__", "__signature__", "is_distributed"}


@pytest.mark.parametrize("path", ["step", "Communicator.send", "Communicator.static", "Communicator.cls"])
def test_a_wrapper_has_its_originals_globals_defaults_annotations_and_source(ledger, on_disk, hook, path):
    get = functools.partial(functools.reduce, getattr, path.split("."))

    def asked():
        function = getattr(get(on_disk), "__func__", get(on_disk))
        return (
            *(
                getattr(function, f"__{name}__")
                for name in ("globals", "defaults", "kwdefaults", "annotations", "dict")
            ),
            inspect.signature(function),
            inspect.signature(function, eval_str=True),
            inspect.getfullargspec(function),
            inspect.getsource(function),
            inspect.getmodule(function),
            typing.get_type_hints(function),
            pickle.dumps(get(on_disk)),
        )

    vars(getattr(get(on_disk), "__func__", get(on_disk)))["mark"] = 1
    before = asked()
    ledger.install([seam(path, hook, module="hostmodule")], ALL)
    globals_, *after = asked()
    assert hasattr(get(on_disk), "__wrapped__")
    assert globals_ is before[0] is vars(on_disk)
    for name in ("__wrapped__", "__signature__"):
        del after[3][name]
    assert after == list(before[1:])


def test_defaults_on_a_wrapper_make_no_difference_to_calls(ledger, module, hook):
    ledger.install([seam("step", hook)], ALL)
    assert module.step.__defaults__ == (None,)
    assert module.step.__kwdefaults__ == {"forward_only": False}
    for _ in range(100):  # until the interpreter has specialised the call
        assert module.step(1) == (1, None, False)
        assert module.step(1, forward_only=2) == (1, None, 2)
    with pytest.raises(TypeError):
        module.step()


def test_a_changed_copy_of_the_source_runs_in_the_functions_globals(ledger, on_disk, hook, calls):
    """As Primus patches what a wrapper can't reach."""
    ledger.install([seam("step", hook, module="hostmodule")], ALL)
    source = inspect.getsource(on_disk.step).replace("return 1", "return HELPER()")
    new = {}
    exec(source, on_disk.step.__globals__, new)
    on_disk.step = new["step"]
    assert on_disk.step() == 42
    assert not calls
    ledger.look()
    assert on_disk.step() == 42
    assert len(calls) == 2


def test_what_is_carried_by_value_passes_through_where_this_package_is_not_installed(ledger, module, hook):
    """As Ray carries functions of `__main__`: code and what is in the closure."""

    def with_a_lock(original, groups):
        lock = threading.Lock()
        return Hook(lambda args, kwargs: lock, lambda token, result, error: None)

    ledger.install([seam("step", with_a_lock)], ALL)
    code, cells = module.step.__code__, [cell.cell_contents for cell in module.step.__closure__]
    carried = [cell if isinstance(cell, types.FunctionType) else pickle.dumps(cell) for cell in cells]
    assert not any(isinstance(cell, bytes) and b"megatron_autoinstrument" in cell for cell in carried)
    assert [cell for cell in cells if isinstance(cell, types.FunctionType)] == [module.step.__wrapped__]
    there = [pickle.loads(cell) if isinstance(cell, bytes) else cell for cell in carried]
    copied = types.FunctionType(code, {}, "step", None, tuple(types.CellType(cell) for cell in there))
    assert copied(1, 2) == (1, 2, False)


@pytest.mark.parametrize("kind", ["yield 1", "await None"])
def test_of_a_generator_or_a_coroutine_nothing_is_recorded_and_that_is_said_once(ledger, module, hook, caplog, kind):
    exec(f"{'async ' if 'await' in kind else ''}def later():\n    {kind}\n", vars(module))
    original = module.later
    ledger.install([seam("later", hook)], ALL)
    ledger.look()
    assert module.later is original
    assert [record.getMessage() for record in caplog.records] == [
        "megatron.fake.later is a generator or a coroutine: nothing is recorded of it."
    ]


def test_uninstall_puts_back_the_very_objects(ledger, module, hook):
    def state():
        return {
            (holder.__name__, name): value
            for holder in (module, module.Base, module.Communicator)
            for name, value in vars(holder).items()
        }

    paths = ["step", "Communicator.send", "Communicator.static", "Communicator.cls", "Communicator.inherited"]
    before = state()
    ledger.install([seam(path, hook) for path in paths], ALL)
    assert state() != before
    ledger.uninstall()
    after = state()
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def test_names_bound_before_a_late_install_are_rebound_and_put_back(ledger, module, fake_module, hook):
    user = fake_module("megatron.user")
    original = user.step = module.step
    ledger.install([seam("step", hook)], ALL)
    assert user.step is module.step is not original
    fake_module("megatron.later").step = module.step  # bound while installed
    ledger.uninstall()
    assert user.step is module.step is sys.modules["megatron.later"].step is original


@pytest.mark.parametrize("file", ["/home/me/train.py", "/opt/venv/lib/python3.12/site-packages/somelib.py", None])
def test_names_bound_elsewhere_are_rebound_wherever_that_is_and_put_back(ledger, module, fake_module, hook, file):
    mine = fake_module("mine")
    mine.__file__ = file
    original = mine.renamed = module.step
    ledger.install([seam("step", hook)], ALL)
    assert mine.renamed is module.step is not original
    mine.again = module.step
    ledger.uninstall()
    assert mine.renamed is mine.again is module.step is original


def test_a_lazy_module_is_not_loaded(ledger, module, hook, monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    ledger.install([seam("step", hook)], ALL)
    ledger.uninstall()


def test_a_function_from_elsewhere_is_patched_where_its_package_reexports_it(ledger, module, fake_module, hook, calls):
    package, home = fake_module("toolkit"), fake_module("toolkit.serialization", "def save(x): return x")
    package.save = original = home.save
    module.toolkit = package
    package.serialization = home
    ledger.install([seam("toolkit.save", hook, home="toolkit.serialization")], ALL)
    assert package.save is not original
    assert package.save(1) == 1
    ledger.uninstall()
    assert package.save is home.save is original


def test_such_a_function_can_be_pickled_also_where_the_module_is_imported_later(ledger, hook, tmp_path, monkeypatch):
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "__init__.py").write_text("from toolkit.serialization import save\n")
    (tmp_path / "toolkit" / "serialization.py").write_text("def save(x): return x\n")
    (tmp_path / "uses_toolkit.py").write_text("import toolkit\n")
    monkeypatch.syspath_prepend(tmp_path)
    ledger.install([seam("toolkit.save", hook, "uses_toolkit", home="toolkit.serialization")], ALL)
    import toolkit.serialization
    import uses_toolkit  # noqa: F401

    assert hasattr(toolkit.save, "__wrapped__")
    assert pickle.loads(pickle.dumps(toolkit.save)) is toolkit.save is toolkit.serialization.save
    ledger.uninstall()
    assert not hasattr(toolkit.serialization.save, "__wrapped__")
    for name in ("uses_toolkit", "toolkit", "toolkit.serialization"):
        sys.modules.pop(name, None)


def test_only_seams_of_groups_that_are_on_are_patched(ledger, module, hook):
    original = module.step
    ledger.install([Seam("megatron.fake", "step", {"off"}, hook)], ALL)
    assert module.step is original


def test_a_module_imported_later_is_patched_when_it_is(ledger, hook, calls, tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("def step(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("imported_later", None)
    ledger.install([seam("step", hook, module="imported_later")], ALL)
    import imported_later

    assert imported_later.step() == 1
    assert len(calls) == 2
    ledger.uninstall()
    assert imported_later.step() == 1
    assert len(calls) == 2
    sys.modules.pop("imported_later", None)


def test_a_module_imported_after_uninstall_is_left_alone(ledger, hook, calls, tmp_path, monkeypatch):
    (tmp_path / "imported_too_late.py").write_text("def step(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    ledger.install([seam("step", hook, module="imported_too_late")], ALL)
    ledger.uninstall()
    import imported_too_late

    assert not hasattr(imported_too_late.step, "__wrapped__")
    sys.modules.pop("imported_too_late", None)


def test_a_seam_that_does_not_exist_is_reported_once_and_costs_nothing_else(ledger, module, hook, caplog):
    caplog.set_level(logging.INFO)
    ledger.install([seam("no_such", hook), seam("Communicator.no_such", hook), seam("step", hook)], ALL)
    assert hasattr(module.step, "__wrapped__")
    assert [record.getMessage() for record in caplog.records] == [
        "This Megatron has no megatron.fake.no_such that we know: nothing is recorded of it.",
        "This Megatron has no megatron.fake.Communicator.no_such that we know: nothing is recorded of it.",
    ]


def test_a_function_that_a_newer_one_replaced_is_left_alone_without_a_word(ledger, module, hook, caplog):
    caplog.set_level(logging.INFO)
    original = module.step
    ledger.install([seam("step", hook, unless="Communicator"), seam("gone", hook, unless="Communicator")], ALL)
    assert module.step is original
    assert not caplog.records


class Reluctant(types.ModuleType):
    """A module that refuses to have one of its names set."""

    def __setattr__(self, name, value):
        if name == "second":
            raise RuntimeError("refused")
        super().__setattr__(name, value)


def test_a_half_done_install_is_rolled_back(ledger, hook, monkeypatch):
    module = Reluctant("megatron.reluctant")
    exec("def first(): pass\ndef second(): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = dict(vars(module))
    with pytest.raises(RuntimeError, match="refused"):
        ledger.install([seam("first", hook, module.__name__), seam("second", hook, module.__name__)], ALL)
    assert vars(module) == before


def test_a_function_that_we_cannot_read_costs_its_own_spans_and_no_others(ledger, module, hook, monkeypatch, caplog):
    monkeypatch.setattr(patching, "reraise_internal_errors", False)

    def broken(original, groups):
        raise KeyError("a fork's")

    original = module.Communicator.send
    ledger.install([seam("Communicator.send", broken), seam("step", hook)], ALL)
    assert module.Communicator.send is original
    assert hasattr(module.step, "__wrapped__")
    assert [record.getMessage() for record in caplog.records] == [
        "Could not instrument megatron.fake.Communicator.send: its spans are left out."
    ]


@pytest.mark.parametrize("value", [functools.partial(print), type("Callable", (), {"__call__": print})(), 3])
def test_in_a_class_only_what_binds_self_is_wrapped(ledger, module, hook, value):
    module.Communicator.send = value
    ledger.install([seam("Communicator.send", hook)], ALL)
    assert vars(module.Communicator)["send"] is value


def test_a_failure_inside_megatrons_import_reaches_the_log_and_not_the_import(
    ledger, hook, caplog, tmp_path, monkeypatch
):
    monkeypatch.setattr(patching, "reraise_internal_errors", False)
    (tmp_path / "imported_badly.py").write_text("def step(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    ledger.install([seam("step", hook, "imported_badly")], ALL)
    monkeypatch.setattr(ledger, "_patch_module", lambda module: 1 / 0)
    import imported_badly

    assert not hasattr(imported_badly.step, "__wrapped__")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    sys.modules.pop("imported_badly", None)


def test_there_is_one_wrapper_per_seam_for_the_life_of_the_process(ledger, module, hook, calls):
    step = seam("step", hook)
    ledger.install([step], ALL)
    held = module.step
    ledger.uninstall()
    held(1)
    assert not calls  # it passes through
    ledger.install([step], ALL)
    assert module.step is held
    held(1)
    assert len(calls) == 2  # and comes alive again


def test_a_wrapper_of_somebody_else_on_top_of_ours_stays(ledger, module, hook, calls):
    step = seam("step", hook)
    ledger.install([step], ALL)
    ours = module.step

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    module.step = theirs
    ledger.uninstall()
    assert module.step is theirs
    assert module.step(1) == (1, None, False)
    assert not calls
    ledger.install([step], ALL)
    assert module.step is not theirs  # which may call the wrapper below it, or not
    module.step(1)
    assert len(calls) == 2
    ledger.uninstall()
    assert module.step is theirs


def test_what_somebody_wrapped_while_we_were_uninstalled_is_wrapped_anew(ledger, module, hook, calls):
    step = seam("step", hook)
    ledger.install([step], ALL)
    ledger.uninstall()
    original = module.step
    theirs = module.step = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))
    ledger.install([step], ALL)
    module.step(1)
    assert len(calls) == 2
    ledger.uninstall()
    assert module.step is theirs


def test_a_chain_of_wrappers_that_is_a_circle_ends(ledger, module, hook):
    module.step.__wrapped__ = module.step
    del hook  # a signature can't be had of it
    ledger.install([seam("step", lambda original, groups: None)], ALL)


def test_a_wrapper_of_somebody_else_below_ours_is_put_back(ledger, module, hook, calls):
    step = seam("step", hook)
    below = module.step
    theirs = module.step = functools.wraps(below)(lambda *args, **kwargs: below(*args, **kwargs))
    ledger.install([step], ALL)
    module.step(1)
    assert len(calls) == 2
    ledger.uninstall()
    assert module.step is theirs


@pytest.mark.parametrize("part", ["begin", "end"])
def test_a_failure_of_ours_never_reaches_the_caller_and_turns_the_seam_off(ledger, module, monkeypatch, caplog, part):
    monkeypatch.setattr(patching, "reraise_internal_errors", False)
    runs = []

    def fail(*args):
        raise RuntimeError("ours")

    def broken(original, groups):
        def begin(args, kwargs):
            runs.append("begin")
            return fail() if part == "begin" else "token"

        return Hook(begin, fail)

    ledger.install([seam("step", broken)], ALL)
    assert module.step(1) == (1, None, False)
    assert module.step(2) == (2, None, False)
    assert runs == ["begin"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "megatron.fake.step" in record.getMessage()


def test_silenced_wrappers_stay_in_place_and_pass_through(ledger, module, hook, calls):
    ledger.install([seam("step", hook)], ALL)
    wrapper = module.step
    ledger.silence()
    assert module.step is wrapper
    module.step(1)
    assert not calls


def test_arguments_are_read_by_name_however_they_are_passed():
    def function(a, b=2, *, c=3):
        pass

    a, b, c, d = (patching.argument(function, name) for name in "abcd")
    assert [read((1,), {}) for read in (a, b, c, d)] == [1, 2, 3, None]
    assert [read((), {"a": 4, "b": 5, "c": 6}) for read in (a, b, c, d)] == [4, 5, 6, None]
    assert [read((7, 8), {}) for read in (a, b)] == [7, 8]


def test_arguments_beyond_the_signature_are_no_error():
    def function(a):
        pass

    assert patching.argument(function, "a")((), {}) is None
    assert patching.argument(function, "b")((1, 2, 3), {"x": 1}) is None


# ------------------------------------------------------------------------------------------ the host's liberties


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """A module that can be imported, also by a child process."""
    (tmp_path / "hostmodule.py").write_text(
        "def step(path: str | None = None, *, more: int = 0):\n"
        "    if path:\n        open(path, 'w').write('called')\n    return 1\n\n"
        "def HELPER(): return 42\n\n" + SOURCE.partition("class Base")[1] + SOURCE.partition("class Base")[2]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostmodule", raising=False)
    yield importlib.import_module("hostmodule")
    sys.modules.pop("hostmodule", None)


def test_unwrap_gives_the_original(ledger, module, hook):
    original = module.step
    ledger.install([seam("step", hook)], ALL)
    assert inspect.unwrap(module.step) is original


def test_a_patched_function_is_the_target_of_a_spawned_process(ledger, on_disk, hook, tmp_path):
    ledger.install([seam("step", hook, module="hostmodule")], ALL)
    process = multiprocessing.get_context("spawn").Process(target=on_disk.step, args=(str(tmp_path / "out"),))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert (tmp_path / "out").read_text() == "called"


def test_a_module_that_is_loaded_again_is_as_it_would_be_without_us_until_the_next_install(
    ledger, on_disk, hook, calls
):
    ledger.install([seam("step", hook, module="hostmodule")], ALL)
    importlib.reload(on_disk)
    assert on_disk.step() == 1
    fresh = on_disk.step
    ledger.uninstall()
    assert on_disk.step is fresh
    calls.clear()
    ledger.install([seam("step", hook, module="hostmodule")], ALL)
    assert on_disk.step() == 1
    assert len(calls) == 2


def test_a_name_that_the_user_has_bound_anew_meanwhile_stays(ledger, module, hook):
    def theirs():
        return "theirs"

    ledger.install([seam("step", hook)], ALL)
    module.step = theirs
    ledger.uninstall()
    assert module.step is theirs
    ledger.install([seam("step", hook)], ALL)
    assert module.step() == "theirs"
    ledger.uninstall()
    assert module.step is theirs


class _Lazy:
    """What a library puts into sys.modules in the place of its module, to load it on first use."""

    def __init__(self, module):
        self.__dict__["_module"] = module

    def __getattr__(self, name):
        return getattr(self._module, name)


def test_what_stands_in_sys_modules_for_a_module_is_left_as_it_is_or_patched_and_put_back(ledger, module, hook):
    lazy = sys.modules["megatron.fake"] = _Lazy(module)
    original = lazy.step
    ledger.install([seam("step", hook)], ALL)
    assert lazy.step(None, 1) is not None
    ledger.uninstall()
    assert lazy.step is original
    assert module.step is original


def test_a_subclass_that_overrides_a_patched_method_and_calls_it_gives_one_call_of_each(ledger, module, hook, calls):
    class Subclass(module.Communicator):
        def send(self, *args, **kwargs):
            return super().send(*args, **kwargs)

    ledger.install([seam("Communicator.send", hook)], ALL)
    assert Subclass().send(1)[1] == 1
    assert [call[0] for call in calls] == ["begin", "end"]


# ------------------------------------------------------------------------------------------ replaced after us


def not_named(f):
    """A wrapper that doesn't say what it wraps."""
    return lambda *args, **kwargs: f(*args, **kwargs)


def named(f):
    return functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))


def copied(f):
    f = inspect.unwrap(f)
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    copy.__kwdefaults__ = f.__kwdefaults__
    return copy


def named_only(f):
    @functools.wraps(f)
    def own(*args, **kwargs):
        return "own"

    return own


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("replace", [not_named, named, copied, named_only])
@pytest.mark.parametrize("path", ["step", "Communicator.send", "Communicator.static"])
def test_what_replaces_a_function_is_recorded_once_a_call_and_stays_after_uninstall(
    ledger, module, hook, calls, path, replace, before
):
    holder = module if path == "step" else module.Communicator
    name = path.rpartition(".")[2]
    keep = staticmethod if name == "static" else lambda f: f
    if not before:
        ledger.install([seam(path, hook)], ALL)
    theirs = replace(getattr(holder, name))
    setattr(holder, name, keep(theirs))
    if before:
        ledger.install([seam(path, hook)], ALL)
    ledger.look()
    ledger.look()
    getattr(holder, name)(1, 2) if name == "send" else getattr(holder, name)(1)
    assert [call[0] for call in calls] == ["begin", "end"]
    ledger.uninstall()
    assert getattr(holder, name) is theirs
    getattr(holder, name)(1, 2) if name == "send" else getattr(holder, name)(1)
    assert len(calls) == 2


def test_of_hooks_that_keep_no_token_too_the_outermost_runs_alone(ledger, module, calls):
    def only_begins(original, groups):
        return Hook(lambda args, kwargs: calls.append("begin"), lambda token, result, error: None)

    ledger.install([seam("step", only_begins)], ALL)
    module.step = not_named(module.step)
    ledger.look()
    for number in (1, 2):
        module.step(1)
        assert calls == ["begin"] * number


def test_a_patch_manager_takes_back_and_applies_again(ledger, module, fake_module, hook, calls):
    bound = fake_module("bound")
    theirs = [copied(module.step), copied(module.step)]
    ledger.install([seam("step", hook)], ALL)
    ours = bound.step = module.step
    for number, put in enumerate([theirs[0], ours, theirs[1], theirs[0], ours], 1):
        module.step = put
        ledger.look()
        module.step(1)
        assert len(calls) == 2 * number
    ledger.uninstall()
    assert module.step is bound.step is ours.__wrapped__


@pytest.mark.parametrize("path", ["step", "Communicator.send"])
def test_an_old_wrapper_that_was_put_back_comes_alive_and_is_taken_out(ledger, module, hook, calls, path):
    holder, name = (module, "step") if path == "step" else (module.Communicator, "send")
    original, seams = vars(holder)[name], [seam(path, hook)]
    ledger.install(seams, ALL)
    ours = vars(holder)[name]
    ledger.uninstall()
    setattr(holder, name, ours)
    ledger.install(seams, ALL)
    getattr(holder, name)(1, 2)
    assert len(calls) == 2
    ledger.uninstall()
    assert vars(holder)[name] is original


@pytest.mark.parametrize("function", [len, functools.partial(len), [].__len__])
def test_in_a_module_what_is_callable_without_being_a_function_is_recorded_too(ledger, module, calls, function):
    def hook(original, groups):
        return Hook(lambda args, kwargs: calls.append(1), lambda token, result, error: None)

    module.step = function
    ledger.install([seam("step", hook)], ALL)
    with contextlib.suppress(TypeError):
        module.step([])
    assert calls
    ledger.uninstall()
    assert module.step is function


def test_what_cannot_be_wrapped_is_named_once(ledger, module, hook, caplog):
    ledger.install([seam("step", hook), seam("Communicator.send", hook)], ALL)
    module.step = type("Step", (), {})
    module.Communicator.send = functools.partial(print)
    for _ in range(3):
        ledger.look()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "megatron.fake.step is no function but type: nothing is recorded of it."),
        ("WARNING", "megatron.fake.Communicator.send is no function but partial: nothing is recorded of it."),
    ]


def test_calls_that_look_do_so_and_of_the_first_ones_only_the_first(module, hook, calls):
    looks = []
    ledger = Patcher(lambda look: (looks.append(1), look()))
    vars(module)["build"], vars(module)["log"] = (lambda: None), (lambda: None)
    seams = [
        seam("step", hook, looks="first"),
        seam("log", hook, looks="first"),
        seam("build", hook, looks="always"),
        seam("Communicator.static", hook),
    ]
    ledger.install(seams, ALL)
    module.Communicator.static = staticmethod(copied(module.Communicator.static))
    module.Communicator.static(1)
    assert not calls
    for function, count in ((module.step, 1), (module.log, 1), (module.step, 1)):
        function(1) if function is module.step else function()
        assert len(looks) == count
    module.Communicator.static(1)
    assert len(calls) == 8
    module.build()
    module.build()
    assert len(looks) == 3
    module.log()  # the first step after that
    module.step(1)
    assert len(looks) == 4
    ledger.uninstall()


def test_a_call_that_has_begun_when_its_function_is_found_replaced_is_named(module, hook, calls, caplog):
    ledger = Patcher()
    ledger.install([seam("step", hook, looks="first"), seam("run", hook)], ALL)
    exec("def run():\n    step(1)\n    step(2)\n", vars(module))
    module.run()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "megatron.fake.run was replaced right before this call of it, which is not recorded."
    ]
    assert len(calls) == 4
    module.run()
    assert len(calls) == 10
    ledger.uninstall()


def test_arguments_are_those_of_the_function_that_a_wrapper_without_parameters_passes_them_to(ledger, module):
    read = []

    def reading(original, groups):
        iteration = patching.argument(original, "iteration")
        return Hook(lambda args, kwargs: read.append(iteration(args, kwargs)), lambda token, result, error: None)

    module.step = not_named(module.step)
    ledger.install([seam("step", reading)], ALL)
    module.step("model", 7)
    ledger.uninstall()
    ledger.install([seam("Communicator.send", reading), seam("step", reading)], ALL)
    held = module.step
    module.step = (lambda holder: lambda *args, **kwargs: holder["f"](*args, **kwargs))({"f": held})
    ledger.look()
    module.step("model", 8)
    assert read == [7, 8]


def test_a_seam_that_our_own_failure_turned_off_stays_off(ledger, module, monkeypatch, caplog):
    monkeypatch.setattr(patching, "reraise_internal_errors", False)
    lost = []
    broken = seam("step", lambda o, g: Hook(lambda a, k: 1 / 0, lambda *of: None), lost=lambda given: lost.append(1))
    ledger.install([broken], ALL)
    for _ in range(3):
        module.step(1)
        ledger.look()
    assert len(caplog.records) == len(lost) == 1


@pytest.mark.parametrize("value", [None, type("Other", (), {})])
def test_whoever_counts_calls_is_told_when_some_are_not_seen(ledger, module, hook, value):
    lost = []
    if value is None:
        del module.step
    else:
        module.step = value
    ledger.install([seam("step", hook, lost=lambda given: lost.append(1))], ALL)
    assert lost == [1]


def test_a_method_of_wrapts_is_told_its_instance(ledger, fake_module, hook, calls):
    seen = []

    @wrapt.decorator
    def theirs(wrapped, instance, args, kwargs):
        seen.append((instance, args))
        return wrapped(*args, **kwargs)

    module = fake_module("megatron.fake", SOURCE)
    module.Communicator.send = theirs(vars(module.Communicator)["send"])
    module.Communicator.cls = classmethod(theirs(vars(module.Communicator)["cls"].__func__))
    one = module.Communicator()
    expected = [one.send(1), module.Communicator.cls(2)]
    before, seen[:] = list(seen), []
    ledger.install([seam("Communicator.send", hook), seam("Communicator.cls", hook)], ALL)
    assert [one.send(1), module.Communicator.cls(2)] == expected
    assert seen == before
    assert before[0] == (one, (1,))  # of a class method, it depends on Python's version
    assert len(calls) == 4
    ledger.uninstall()
    assert one.send(1) == expected[0]


def test_somebodys_wrapper_that_calls_ours_now_and_then_is_recorded_each_time(ledger, module, hook, calls):
    ledger.install([seam("step", hook)], ALL)
    ours = module.step

    @functools.wraps(ours)
    def theirs(model, own=False):
        return "own" if own else ours(model)

    module.step = theirs
    ledger.look()
    ledger.look()
    assert module.step(1, own=True) == "own"
    assert module.step(1) == (1, None, False)
    assert [call[0] for call in calls] == ["begin", "end"] * 2
    module.step = ours  # they take it back
    ledger.look()
    module.step(1)
    assert len(calls) == 6
    ledger.uninstall()
    assert module.step is not ours


def test_a_helper_put_in_the_place_of_a_function_stays_itself_where_it_is_called_by_its_own_name(
    ledger, module, fake_module, hook, calls
):
    tools = fake_module("tools", "def nothing(*args, **kwargs): pass\ndef step(): pass\n")
    module.step = module.Communicator.helper = tools.nothing
    program = fake_module("program", "from tools import nothing\nfrom megatron.fake import step\n")
    before = tools.nothing
    ledger.install([seam("step", hook)], ALL)
    assert (tools.nothing, program.nothing) == (before, before)
    assert program.step is module.step is not before  # by the seam's name, it is the seam
    ledger.uninstall()
    assert program.step is module.step is before


def test_names_bound_in_the_middle_of_the_functions_own_import_are_found_at_the_next_look(
    ledger, hook, calls, tmp_path, monkeypatch
):
    (tmp_path / "circular_step.py").write_text("def step(x): return x\nimport circular_user\ndef run(): step(0)\n")
    (tmp_path / "circular_user.py").write_text("from circular_step import step\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    build = seam("run", hook, module="circular_step", looks="always")
    ledger.install([seam("step", hook, module="circular_step"), build], ALL)
    module = importlib.import_module("circular_step")
    module.run()
    calls.clear()
    assert sys.modules["circular_user"].step(3) == 3
    assert len(calls) == 2


def test_of_what_a_module_does_not_have_while_it_is_being_imported_nothing_is_said(
    ledger, hook, calls, tmp_path, monkeypatch, caplog
):
    (tmp_path / "half.py").write_text("import half_tracing\ndef step(x): return x\n")
    (tmp_path / "half_tracing.py").write_text("import sys\nsys.install()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "install", lambda: ledger.install([seam("step", hook, module="half")], ALL), raising=False)
    with caplog.at_level("INFO"):
        module = importlib.import_module("half")
    assert not caplog.text
    ledger.look()
    module.step(1)
    assert len(calls) == 2
