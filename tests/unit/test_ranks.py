import subprocess
import sys

import pytest

from megatron_autoinstrument.process import ranks, strategies
from megatron_autoinstrument.process.ranks import Rank
from megatron_autoinstrument.settings import config


def exporting(world_size, local_size=None):
    local_size = local_size or world_size
    places = [Rank(rank, world_size, rank % local_size) for rank in range(world_size)]
    return [place.rank for place in places if strategies.exports(place, config.from_environment(place))]


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"}, (3, 4, 3)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (1, 2, 1)),
        # torchrun under srun: SLURM counts nodes then
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (9, 16, 1)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, (0, 1, 0)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, (0, 1, 0)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, (3, 4, None)),
        # the shell of an allocation is a step of its own
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, (1, 2, 1)),
    ],
)
def test_the_launcher_tells_the_rank(monkeypatch, environment, place):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks.current() == place


def test_the_last_rank_alone_exports_by_default():
    assert exporting(8) == [7]
    assert exporting(1) == [0]


def test_a_chosen_rank_exports(monkeypatch):
    monkeypatch.setenv("MEGATRON_OTEL_EXPORT_RANK", "2")
    assert exporting(8) == [2]


def test_a_rank_that_does_not_exist_is_named_and_the_last_exports(monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_OTEL_EXPORT_RANK", "8")
    assert exporting(8) == [7]
    assert [record.getMessage() for record in caplog.records] == [
        "MEGATRON_OTEL_EXPORT_RANK='8' is ignored. Allowed: -1 to 7."
    ]


def test_all_ranks(monkeypatch):
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", "all_ranks")
    assert exporting(4) == [0, 1, 2, 3]


def test_first_rank_per_node(monkeypatch):
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", "first_rank_per_node")
    assert exporting(8, local_size=4) == [0, 4]


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.125, 0.5, 1.0])
def test_sampled_meets_its_rate_and_spreads_over_local_ranks(monkeypatch, rate):
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", "sampled")
    monkeypatch.setenv("MEGATRON_OTEL_EXPORT_SAMPLE_RATE", str(rate))
    chosen = exporting(1024, local_size=8)
    assert chosen == exporting(1024, local_size=8)
    assert len(chosen) == pytest.approx(1024 * rate, abs=2)
    if rate >= 0.125:
        assert len({rank % 8 for rank in chosen}) == 8


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_child_of_multiprocessing_knows_that_it_is_one_while_it_imports_the_main_script(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from megatron_autoinstrument.process import ranks\n"
        "print(__name__, ranks.is_helper_process(), flush=True)\n"
        "def work(): print('work', ranks.is_helper_process(), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context(sys.argv[1]).Process(target=work)\n"
        "    process.start(); process.join()\n"
    )
    printed = subprocess.run([sys.executable, script, method], capture_output=True, text=True, check=True).stdout
    lines = printed.split("\n")[:-1]
    assert lines[0] == "__main__ False"
    assert lines[1:]
    assert all(line.endswith("True") for line in lines[1:])
