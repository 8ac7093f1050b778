"""Which rank a process is, and which run it belongs to, under each launcher: real processes, and as much of Megatron
and torch.distributed as tells it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TORCH = """
import fcntl, json, os
class Store:
    def _with(self, work):
        with open(os.environ["STORE"], "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            held = json.loads(file.read() or "{}")
            answer = work(held)
            file.truncate(0)
            file.write(json.dumps(held))
        return answer
    def compare_set(self, key, expected, desired):
        def work(held):
            if held.get(key, "") == expected:
                held[key] = desired
            return held.get(key, expected).encode()
        return self._with(work)
    def add(self, key, amount):
        def work(held):
            held[key] = held.get(key, 0) + amount
            return held[key]
        return self._with(work)
_place = None
def init_process_group(rank, world_size):
    global _place
    _place = rank, world_size
def is_initialized():
    return _place is not None
def get_rank():
    return _place[0]
def get_world_size():
    return _place[1]
def _get_default_store():
    return Store()
"""
FILES = {
    "torch/__init__.py": "",
    "torch/distributed/__init__.py": "from torch.distributed.distributed_c10d import *",
    "torch/distributed/distributed_c10d.py": TORCH,
    "megatron/core/__init__.py": "",
    "megatron/core/parallel_state.py": "def initialize_model_parallel():\n    pass\n",
    "megatron/core/optimizer/__init__.py": "",
    "megatron/core/optimizer/optimizer.py": "class ChainedOptimizer:\n    def step(self):\n        pass\n",
    "megatron/training/__init__.py": "",
    "megatron/training/global_vars.py": "def set_args(args):\n    global _GLOBAL_ARGS\n    _GLOBAL_ARGS = args\n",
    "megatron/training/arguments.py": "def add_megatron_arguments(parser):\n    return parser\n",
    "megatron/training/training.py": """
import os, types
import torch.distributed
from megatron.core import parallel_state
from megatron.training import global_vars
def parse():
    args = types.SimpleNamespace(rank=int(os.getenv("RANK", "0")), world_size=int(os.getenv("WORLD_SIZE", "1")))
    global_vars.set_args(args)
def initialize():
    args = global_vars._GLOBAL_ARGS
    torch.distributed.init_process_group(args.rank, args.world_size)
    parallel_state.initialize_model_parallel()
def pretrain(model_type=None):
    if "OLD" in os.environ:
        parse()
    initialize()
    setup_model_and_optimizer()
    train()
def setup_model_and_optimizer():
    pass
def train():
    for iteration in range(2):
        train_step(iteration=iteration)
def train_step(iteration=None):
    pass
""",
}
# Megatron's own program, and loops of one's own on its training package and on its core.
PROGRAMS = {
    "pretrain": "from megatron.training import training\n{late}training.parse()\ntraining.pretrain()\n",
    "pretrain, before 0.18": "from megatron.training import training\n{late}training.pretrain()\n",
    "a loop of one's own": "from megatron.training import training\n{late}training.parse()\ntraining.initialize()\n"
    "training.setup_model_and_optimizer()\ntraining.train()\n",
    "a loop on core alone, with groups of its own": "import megatron.core.optimizer.optimizer as o\n{late}"
    "import torch.distributed as t\nt.init_process_group(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))\n"
    "o.ChainedOptimizer().step()\n",
    "a loop on core alone": "import megatron.core\n{late}import torch.distributed as t\n"
    "t.init_process_group(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))\n"
    "from megatron.core import parallel_state\nparallel_state.initialize_model_parallel()\n"
    "from megatron.core.optimizer.optimizer import ChainedOptimizer\nChainedOptimizer().step()\n",
}
LATE = "os.environ.update(RANK=os.environ['CASE_RANK'], WORLD_SIZE=os.environ['CASE_WORLD_SIZE'])\n"


@pytest.fixture
def started(tmp_path):
    """What the ranks record and print that are started with each of these environments: [{rank: …}, output]."""
    for name, source in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    def started(environments, program="pretrain", late=False, groups="all", launch="one", **shared):
        script = tmp_path / "script.py"
        script.write_text("import os\n" + PROGRAMS[program].format(late=LATE if late else ""))
        shared = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "STORE": str(tmp_path / f"store-{launch}"),
            "MEGATRON_OTEL_ENABLED": "1",
            "MEGATRON_OTEL_EXPORTER": "console",
            "MEGATRON_OTEL_METRICS_ENABLED": "0",
            "MEGATRON_OTEL_SPAN_GROUPS": groups,
            **({"OLD": "1"} if program == "pretrain, before 0.18" else {}),
            **shared,
        }
        processes = [
            subprocess.Popen(
                [sys.executable, script],
                env={**shared, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for environment in environments
        ]
        done = [process.communicate(timeout=60) for process in processes]
        assert not any(process.returncode for process in processes), done
        return [spans_in(out) for out, _ in done], "".join(err for _, err in done)

    return started


def spans_in(text):
    spans, decoder = [], json.JSONDecoder()
    while text := text.strip():
        span, end = decoder.raw_decode(text)
        text = text[end:]
        spans.append(span)
    return spans


def place(spans):
    """The rank, world size and local rank of a process, and the number that its instance has."""
    (attributes,) = {json.dumps(span["resource"]["attributes"], sort_keys=True) for span in spans}
    told = json.loads(attributes)
    instance = re.fullmatch(r".+-rank(\d+)", told["service.instance.id"])
    return told["dl.rank"], told["dl.world_size"], told.get("dl.local_rank"), int(instance[1])


def told(rank, **more):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", **more}


def late(rank, **more):
    return {"CASE_RANK": str(rank), "CASE_WORLD_SIZE": "2", **more}


def slurm(rank, size=2):
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_LOCALID": str(rank)}


def mpi(rank):
    return {
        f"OMPI_COMM_WORLD_{name}": str(value) for name, value in (("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank))
    }


RANKS = (0, 1)
# Launcher: the environment of each process, the program, and whether that sets RANK and WORLD_SIZE itself, once it has
# imported Megatron.
LAUNCHERS = {
    "torchrun": ([told(rank, TORCHELASTIC_RUN_ID="none") for rank in RANKS], "pretrain", False),
    "torchrun under srun, whose numbers count nodes": (
        [told(rank, TORCHELASTIC_RUN_ID="none", **slurm(0, 1)) for rank in RANKS],
        "pretrain, before 0.18",
        False,
    ),
    "srun": ([late(rank, **slurm(rank)) for rank in RANKS], "pretrain", True),
    "srun, a loop on core alone": ([late(rank, **slurm(rank)) for rank in RANKS], "a loop on core alone", True),
    "Ray, a loop on core alone": (
        [late(rank) for rank in RANKS],
        "a loop on core alone, with groups of its own",
        True,
    ),
    "mpirun": ([late(rank, **mpi(rank)) for rank in RANKS], "pretrain, before 0.18", True),
    "Ray": ([late(rank) for rank in RANKS], "pretrain, before 0.18", True),
    "Ray, a loop of one's own": ([late(rank) for rank in RANKS], "a loop of one's own", True),
    "Ray, in a pod that has RANK": ([late(rank, RANK="0", WORLD_SIZE="1") for rank in RANKS], "pretrain", True),
    "Ray, in an allocation": ([late(rank, **slurm(0, 8)) for rank in RANKS], "pretrain", True),
    "plain Python": ([{}], "pretrain", False),
    "plain Python, in an allocation": ([slurm(0, 8)], "pretrain", False),
    "plain Python, in an allocation, before 0.18": ([slurm(0, 8)], "pretrain, before 0.18", False),
}
launchers = pytest.mark.parametrize("launcher", LAUNCHERS)


@launchers
def test_all_ranks_know_their_places_and_record_one_run(started, launcher):
    environments, program, sets = LAUNCHERS[launcher]
    of_ranks, said = started(environments, program, sets, MEGATRON_OTEL_RANK_STRATEGY="all_ranks")
    size = len(environments)
    assert not said
    assert [place(spans)[:2] for spans in of_ranks] == [(rank, size) for rank in range(size)]
    assert [place(spans)[3] for spans in of_ranks] == list(range(size))
    assert len({span["resource"]["attributes"]["nemo.run.id"] for spans in of_ranks for span in spans}) == 1
    if "core alone" in program:
        return
    names = [[span["name"] for span in spans] for spans in of_ranks]
    runs = 0 if "own" in program else 1
    assert all(found.count("megatron.pretrain") == runs and found.count("megatron.train_step") == 2 for found in names)
    for iteration in (1, 2):
        traces = {
            span["context"]["trace_id"]
            for spans in of_ranks
            for span in spans
            if span["attributes"].get("megatron.iteration") == iteration
        }
        assert len(traces) == 1


@launchers
def test_the_last_rank_alone_records_by_default_and_one_rank_names_what_is_wrong(started, launcher):
    environments, program, sets = LAUNCHERS[launcher]
    of_ranks, said = started(environments, program, sets, MEGATRON_OTEL_EXPORT_RANK="7", MEGATRON_OTEL_TRACE_SCOPE="x")
    last = len(environments) - 1
    assert [bool(spans) for spans in of_ranks] == [False] * last + [True]
    assert place(of_ranks[-1])[:2] == (last, last + 1)
    assert f"MEGATRON_OTEL_EXPORT_RANK='7' is ignored. Allowed: -1 to {last}." in said
    assert said.count("MEGATRON_OTEL_EXPORT_RANK") == 1
    if "pod that has RANK" not in launcher:  # both are told that they are the first, and what is wrong is wrong for all
        assert said.count("MEGATRON_OTEL_TRACE_SCOPE") == 1


def test_a_value_that_turns_nothing_on_is_named_by_one_rank(started):
    for launcher in ("torchrun", "Ray", "plain Python"):
        environments, program, sets = LAUNCHERS[launcher]
        of_ranks, said = started(environments, program, sets, MEGATRON_OTEL_ENABLED="ture")
        assert not any(of_ranks)
        assert said.count("MEGATRON_OTEL_ENABLED='ture' is ignored.") == 1


@pytest.mark.parametrize(
    ("environments", "first"),
    [
        ([late(rank) for rank in RANKS], None),
        ([late(rank, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1") for rank in RANKS], None),  # each with one device of its own
        ([late(rank, LOCAL_RANK=str(rank + 4)) for rank in RANKS], None),  # devices that others of the job have left
        ([late(rank, **told(rank, TORCHELASTIC_RUN_ID="none")) for rank in RANKS], 0),
        ([late(rank, LOCAL_WORLD_SIZE="2") for rank in RANKS], 0),
        ([late(rank, **slurm(rank), SLURM_STEP_NUM_TASKS="2") for rank in RANKS], 0),
    ],
)
def test_of_the_ranks_of_a_node_one_is_the_first(started, environments, first):
    of_ranks, said = started(environments, late=True, MEGATRON_OTEL_RANK_STRATEGY="first_rank_per_node")
    (recording,) = [rank for rank, spans in enumerate(of_ranks) if spans]
    assert first in (None, recording)
    assert not said


def test_two_launches_on_one_address_are_two_runs(started):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "6000", "MEGATRON_OTEL_RANK_STRATEGY": "all_ranks"}
    environments, program, sets = LAUNCHERS["Ray, a loop of one's own"]
    runs = [started(environments, program, sets, launch=launch, **address)[0] for launch in ("one", "two")]
    ids = [{span["resource"]["attributes"]["nemo.run.id"] for spans in run for span in spans} for run in runs]
    traces = [{span["context"]["trace_id"] for spans in run for span in spans} for run in runs]
    assert len(ids[0]) == len(ids[1]) == 1
    assert not ids[0] & ids[1]
    assert not traces[0] & traces[1]


# A namespace package would have the core that is installed here.
ALONE = (
    "import sys, megatron_autoinstrument.instrumentor\nsys.path[:] = [p for p in sys.path if '-packages' not in p]\n"
)


@pytest.mark.parametrize("package", ["", None])
@pytest.mark.parametrize(("core", "known"), [(False, False), (True, True)])
def test_a_megatron_of_which_nothing_is_known_is_named_by_one_rank(tmp_path, package, core, known):
    """EleutherAI's gpt-neox has megatron/training.py and no core; others have both, or a namespace package."""
    files = {"training.py": "", "neox.py": "", **({"core/__init__.py": ""} if core else {})}
    for name, source in {**files, **({} if package is None else {"__init__.py": package})}.items():
        (tmp_path / "megatron" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "megatron" / name).write_text(source)
    said = [
        subprocess.run(
            [sys.executable, "-c", ALONE + "import megatron.neox\nimport megatron.training"],
            env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "MEGATRON_OTEL_ENABLED": "1", **told(rank)},
            capture_output=True,
            text=True,
            check=True,
        ).stderr.splitlines()
        for rank in RANKS
    ]
    assert not said[0]
    (line,) = said[1]
    assert ("Nothing is recorded" in line) != known
    assert ("of megatron.core" in line) == known


def test_a_megatron_that_is_known_is_not_named_before_its_core_is_imported(started, tmp_path):
    code = "import megatron.training, megatron.training.global_vars"
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "MEGATRON_OTEL_ENABLED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert not done.stderr


FORKING = """
import os, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter
from megatron_autoinstrument import MegatronInstrumentor
from megatron.training import training
provider = TracerProvider()
exporter = ConsoleSpanExporter(formatter=lambda span: f"{os.getpid()} {span.name} ")
provider.add_span_processor(SimpleSpanProcessor(exporter))
megatron = MegatronInstrumentor()
megatron.instrument(tracer_provider=provider)
def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            provider.force_flush()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
def steps():
    for iteration in range(40):
        training.train_step(iteration=iteration)
        training.training_log({}, {}, 0.1, iteration + 1, 0, None, False)
"""
AFTER_A_FORK = {
    "blocks of a comparison": "in_child(steps)",
    "blocks of a comparison, inside training": "training.steps = lambda: in_child(steps)\ntraining.train()",
    "a pause": "pause = megatron.paused()\npause.__enter__()\n"
    "in_child(lambda: (pause.__exit__(None, None, None), steps()))",
    "instrumented again": "again = lambda: (megatron.uninstrument(), megatron.instrument(tracer_provider=provider))\n"
    "in_child(lambda: (again(), steps()))",
    "Megatron's arguments are parsed": "in_child(lambda: (training.parse(), training.initialize(), steps()))",
}


@pytest.mark.parametrize("situation", AFTER_A_FORK)
def test_nothing_wakes_up_in_a_forked_child(started, tmp_path, situation):
    training = tmp_path / "megatron" / "training" / "training.py"
    training.write_text(
        training.read_text() + "def training_log(loss_dict, total_loss_dict, learning_rate, iteration, skipped_iter, "
        "grad_norm, is_first_iteration):\n    pass\ndef train():\n    steps()\n"
    )
    code = (
        f"{FORKING}\nprint('parent', os.getpid())\ntraining.parse()\n"
        "training.global_vars._GLOBAL_ARGS.log_interval = 1000\ntraining.train_step(iteration=0)\n"
        + AFTER_A_FORK[situation]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "STORE": str(tmp_path / "store"),
            "MEGATRON_OTEL_AB": "4",
            "MEGATRON_OTEL_SPAN_GROUPS": "all",
            "MEGATRON_OTEL_METRICS_ENABLED": "0",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (parent,) = re.findall(r"parent (\d+)", done.stdout)
    assert set(re.findall(r"(\d+) megatron\.", done.stdout)) == {parent}
    assert done.stdout.count("megatron-autoinstrument, overhead") <= 1
