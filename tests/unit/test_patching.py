import copy
import functools
import importlib
import inspect
import logging
import multiprocessing
import pickle
import sys
import types

import pytest

from megatron_autoinstrument import patching
from megatron_autoinstrument.patching import Hook, Ledger, Seam

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
    ledger = Ledger()
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


def test_a_marker_on_the_original_is_not_copied(ledger, module, hook):
    module.step._torchdynamo_orig_callable = object()
    ledger.install([seam("step", hook)], ALL)
    assert not hasattr(vars(module.step), "_torchdynamo_orig_callable")
    assert set(vars(module.step)) == {"__wrapped__"}


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


def test_names_in_the_users_own_modules_are_rebound_too_and_those_of_libraries_are_not(
    ledger, module, fake_module, hook
):
    mine, library = fake_module("train"), fake_module("somelib")
    mine.__file__, library.__file__ = "/home/me/train.py", "/opt/venv/lib/python3.12/site-packages/somelib.py"
    original = mine.step = library.step = module.step
    ledger.install([seam("step", hook)], ALL)
    assert mine.step is module.step
    assert library.step is original


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
    assert module.step is theirs  # ours is below it already: no second one
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
        "def step(path=None):\n    if path:\n        open(path, 'w').write('called')\n    return 1\n"
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
