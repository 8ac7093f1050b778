"""What the ranks of a run agree on."""

import os
import threading
import time
import types

import pytest
from standins import Store

from megatron_autoinstrument.export import ids
from megatron_autoinstrument.process import store


@pytest.fixture
def rank(torch_distributed, monkeypatch):
    """Has this process be another rank, new to the run, with this store."""

    def rank(number, its_store, size=2):
        torch_distributed(number, size, its_store)
        monkeypatch.setattr(ids, "_run", None)

    return rank


def with_arguments(fake_module):
    args = types.SimpleNamespace()
    fake_module("megatron.training.global_vars")._GLOBAL_ARGS = args
    return args


def test_all_ranks_have_one_key_and_another_launch_has_another(rank):
    run, other = Store(), Store()
    keys = []
    for number, its_store in ((0, run), (1, run), (0, other)):
        rank(number, its_store)
        keys.append((ids.run_key(1), ids.run_id(1)))
        assert keys[-1] == (ids.run_key(1), ids.run_id(1))
    assert keys[0] == keys[1] != keys[2]
    assert len({id for _, id in keys}) == 2


def test_who_begins_in_mid_run_joins_it_whichever_run_of_the_process_it_is(rank):
    run = Store()
    rank(0, run)
    first, second = ids.run_key(1), ids.run_key(2)
    assert first != second
    rank(1, run)
    assert ids.run_key(0) == second  # this one has counted none


def test_ranks_that_have_gone_through_the_same_runs_agree_on_each(rank, monkeypatch):
    run = Store()
    keys = {}
    states = {0: None, 1: None}
    for number in (1, 2, 3):
        for one in (0, 1):
            rank(one, run)
            monkeypatch.setattr(ids, "_run", states[one])
            keys.setdefault(number, set()).add(ids.run_key(number))
            states[one] = ids._run
    assert [len(found) for found in keys.values()] == [1, 1, 1]
    assert len(set.union(*keys.values())) == 3


def test_a_restart_in_the_process_has_a_store_of_its_own_and_another_key(rank, torch_distributed):
    rank(0, Store())
    first = ids.run_key(0)
    again = Store()
    torch_distributed(0, 2, again)
    second = ids.run_key(1)
    rank(1, again)  # a rank that has taken the place of one that is gone
    assert first != second == ids.run_key(0)


def test_other_arguments_of_megatrons_are_another_run_also_where_nobody_has_seen_it_begin(rank, fake_module):
    rank(0, Store())
    before = ids.run_key(0)
    kept = with_arguments(fake_module)
    assert ids.run_key(0) == before  # they were parsed since
    ids._run = ids._run._replace(args=lambda: kept)
    assert ids.run_key(0) == before
    with_arguments(fake_module)
    assert ids.run_key(0) != before


def test_alone_a_process_asks_nobody():
    assert ids.run_key(0) == ids.run_key(0) != ids.run_key(1)


def test_before_torch_distributed_is_initialised_there_is_no_key_and_later_there_is(rank, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ids.run_key(0) is None
    rank(1, Store())
    assert ids.run_key(0) is not None


class Broken(Store):
    def __init__(self, answer):
        super().__init__()
        self.answer, self.asked = answer, 0

    def compare_set(self, key, expected, desired):
        self.asked += 1
        return self.answer()


def refuses():
    raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_does_not_answer_is_asked_once_within_a_bound_and_named_once(rank, monkeypatch, caplog, hangs):
    go_on = threading.Event()
    broken = Broken(lambda: go_on.wait(10) and b"late" if hangs else refuses())
    monkeypatch.setattr(store, "_PATIENCE_S", 0.1)
    rank(0, broken)
    started = time.monotonic()
    assert [ids.run_key(0) for _ in range(3)] == [None] * 3
    assert time.monotonic() - started < 5
    go_on.set()
    assert broken.asked == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert ("within 0.1 s" if hangs else "RuntimeError") in record.getMessage()


def test_a_torch_with_no_such_store_costs_the_key_alone(rank, fake_module):
    rank(0, Store())
    del fake_module("torch.distributed.distributed_c10d").__dict__["__doc__"]
    assert ids.run_key(0) is None
    assert len(ids.run_id(0)) == 12


@pytest.mark.parametrize("parents", [True, False])
def test_a_forked_child_leaves_its_parents_store_alone_and_asks_its_own(rank, parents):
    run = Store()
    if parents:
        rank(0, run)
    child = os.fork()
    if child == 0:
        if not parents:
            rank(0, run)
        asked = ids.run_key(0) is not None and bool(run)
        os._exit(asked == parents)
    assert os.waitpid(child, 0)[1] == 0
