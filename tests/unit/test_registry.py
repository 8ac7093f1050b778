import sys

import pytest

from megatron_autoinstrument import register_rank_strategy, register_sampling_strategy
from megatron_autoinstrument.process import strategies
from megatron_autoinstrument.process.ranks import Rank
from megatron_autoinstrument.settings import config


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    for registry in (strategies.RANK_STRATEGIES, strategies.SAMPLING_STRATEGIES):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


def even(place, settings):
    return place.rank % 2 == 0


def exporting(world_size):
    places = [Rank(rank, world_size, rank) for rank in range(world_size)]
    return [place.rank for place in places if strategies.exports(place, config.from_environment(place))]


def test_a_registered_strategy_chooses_the_ranks(monkeypatch):
    register_rank_strategy("even", even)
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", "even")
    assert exporting(4) == [0, 2]


@pytest.mark.parametrize("name", ["all_ranks", ""])
def test_a_name_that_is_taken_or_empty_is_refused(name):
    with pytest.raises(ValueError, match="all_ranks"):
        register_rank_strategy(name, even)


def test_a_packages_entry_point_needs_no_import(monkeypatch, tmp_path):
    (tmp_path / "choosing.py").write_text("def odd(place, config): return place.rank % 2 == 1\n")
    info = tmp_path / "choosing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: choosing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megatron_autoinstrument_rank_strategy]\nodd = choosing:odd\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", "odd")
    assert exporting(4) == [1, 3]
    assert "odd" in strategies.RANK_STRATEGIES.names()
    del sys.modules["choosing"]


def test_rank_aware_sampling_keeps_all_of_a_rank_or_nothing(monkeypatch):
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    monkeypatch.setenv("MEGATRON_OTEL_EXPORT_SAMPLE_RATE", "0.5")
    settings = config.from_environment(Rank(0, 8, 0))
    samplers = [strategies.SAMPLING_STRATEGIES.get("rank_aware")(Rank(rank, 8, rank), settings) for rank in range(8)]
    chosen = [strategies.sampled(Rank(rank, 8, rank), settings) for rank in range(8)]
    assert samplers == [ALWAYS_ON if kept else ALWAYS_OFF for kept in chosen]
    assert len(set(samplers)) == 2


def test_a_registered_sampling_strategy_makes_the_sampler(monkeypatch):
    register_sampling_strategy("mine", lambda place, settings: place)
    monkeypatch.setenv("MEGATRON_OTEL_SAMPLING_STRATEGY", "mine")
    assert config.from_environment(Rank(0, 1, 0)).sampling_strategy == "mine"
    assert strategies.SAMPLING_STRATEGIES.get("mine")(Rank(0, 1, 0), None) == Rank(0, 1, 0)
