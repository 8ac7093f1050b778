import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_autoinstrument import autoload

ROOT = Path(__file__).parents[2]
PTH = ROOT / "megatron_autoinstrument.pth"


@pytest.fixture
def megatron(tmp_path):
    """A package called megatron that can be imported."""
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return tmp_path


def python(code, path, *options, **environment):
    environment = {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", **environment}
    done = subprocess.run([sys.executable, *options, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.split()


STATE = (
    "import sys; from megatron_autoinstrument import autoload; {before}\n"
    "print(sum(type(f).__name__ == '_BeforeMegatron' for f in sys.meta_path), 'opentelemetry.trace' in sys.modules)\n"
    "import megatron.core\n"
    "from megatron_autoinstrument import MegatronInstrumentor as I; print(I().is_instrumented_by_opentelemetry)"
)


def test_the_wheel_carries_the_pth_file(tmp_path):
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert zipfile.ZipFile(wheel).read(PTH.name) == PTH.read_bytes()


def test_the_pth_line_does_nothing_unless_asked(megatron):
    assert python(STATE.format(before=f"exec({PTH.read_text()!r})"), megatron)[:2] == ["0", "False"]


@pytest.mark.parametrize("name", ["MEGATRON_OTEL_ENABLED", "NEMO_LENS_ENABLED"])
def test_the_pth_line_waits_for_megatron_before_it_imports_opentelemetry(megatron, name):
    line = PTH.read_text()
    printed = python(STATE.format(before=f"exec({line!r}); exec({line!r})"), megatron, **{name: "1"})
    assert printed == ["1", "False", "True"]


def test_the_pth_line_that_waits_has_imported_nothing_but_itself(megatron):
    printed = python(
        "import os, sys; before = set(sys.modules)\n"
        f"exec({PTH.read_text()!r})\n"
        "print(*sorted(set(sys.modules) - before))",
        megatron,
        "-S",  # or that of this environment has run already
        MEGATRON_OTEL_ENABLED="1",
    )
    package = "megatron_autoinstrument"
    assert set(printed) <= {"__future__", package, f"{package}.autoload", f"{package}.version"}
    assert f"{package}.autoload" in printed


@pytest.mark.parametrize("value", ["0", "off"])
def test_the_pth_line_leaves_megatron_alone_when_the_variable_says_no(megatron, value):
    printed = python(STATE.format(before=f"exec({PTH.read_text()!r})"), megatron, MEGATRON_OTEL_ENABLED=value)
    assert printed[-1] == "False"


def test_the_pth_line_is_one_that_site_runs():
    (line,) = PTH.read_text().splitlines()
    assert line.startswith("import ")


def test_the_call_comes_once_before_the_import_and_no_other_finder_is_skipped(megatron, monkeypatch):
    seen = []
    monkeypatch.syspath_prepend(megatron)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("megatron", "megatron.core"):
        sys.modules.pop(name, None)

    class Witness:
        def find_spec(self, name, path=None, target=None):
            seen.append(name)

    sys.meta_path.insert(0, Witness())
    autoload.before_megatron(lambda: seen.append("call"))
    import megatron.core

    assert seen == ["call", "megatron", "megatron.core"]
    for name in ("megatron", "megatron.core"):
        sys.modules.pop(name, None)


def test_a_broken_installation_of_ours_does_not_break_megatrons_import(megatron):
    (megatron / "wrapt.py").write_text("raise ImportError('no wrapt here')\n")
    code = f"exec({PTH.read_text()!r}); import megatron.core; print('imported')"
    for value, complaints in (("1", 1), ("0", 0)):
        environment = {"PYTHONPATH": f"{megatron}{os.pathsep}{ROOT}", "MEGATRON_OTEL_ENABLED": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout == "imported\n"
        assert done.stderr.count("Could not instrument Megatron; nothing is recorded.") == complaints


def test_the_call_taken_back_never_comes(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finder = autoload.before_megatron(lambda: 1 / 0)
    before = list(sys.meta_path)
    autoload.forget(finder)
    finder.find_spec("megatron")
    assert sys.meta_path == before  # it would make an import under way skip another


AUTO = "os.path.dirname(importlib.util.find_spec('opentelemetry.instrumentation.auto_instrumentation').origin)"
KEEP = (
    "import importlib.util, os, sys; from megatron_autoinstrument import MegatronInstrumentor, autoload\n"
    f"entry = {AUTO}; sys.path.append(entry); MegatronInstrumentor().instrument(); autoload.keep_for_workers()\n"
    "print(os.environ['PYTHONPATH'].split(os.pathsep).count(entry))"
)


@pytest.mark.parametrize(
    ("script", "environment", "kept"),
    [
        ("torchrun", {}, "1"),
        ("torchrun", {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "1"),  # a launcher under srun
        ("torchrun", {"MEGATRON_OTEL_EXPORT_RANK": "5"}, "1"),  # of its ranks, not of the launcher: no complaint
        ("torchrun", {"MEGATRON_OTEL_ENABLED": "0"}, "0"),
        # exported in the shell or the pod that starts the launcher, where it may count nodes
        ("torchrun", {"RANK": "0", "WORLD_SIZE": "2"}, "1"),
        ("train.py", {}, "0"),
        ("train.py", {"RANK": "0", "WORLD_SIZE": "2"}, "0"),
        ("train.py", {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "0"),
    ],
)
def test_the_wrappers_path_is_kept_in_a_launcher_and_nowhere_else(tmp_path, script, environment, kept):
    (tmp_path / script).write_text(KEEP)
    done = subprocess.run(
        [sys.executable, tmp_path / script],
        env={"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == (kept, "")


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python /venv/bin/torchrun --nproc-per-node 8 pretrain_gpt.py", "torchrun"),
        ("python -m torch.distributed.run pretrain_gpt.py", "torch.distributed.run"),
        ("python -u -W ignore -X importtime -Im torch.distributed.launch pretrain_gpt.py", "torch.distributed.launch"),
        # ranks, whose words speak of a launcher
        ("python -u pretrain_gpt.py --save /checkpoints/torchrun", "pretrain_gpt.py"),
        ("python -u /home/torchrun/pretrain_gpt.py", "pretrain_gpt.py"),
        ("python -m pretrain_gpt torchrun", "pretrain_gpt"),
        ("python -c pass torchrun", ""),
        ("python -cpass torchrun", ""),
        ("python - torchrun", ""),
        ("python", ""),
    ],
)
def test_what_a_command_line_runs_is_its_script_or_module_and_no_other_word(command, program):
    assert autoload._program(command.split()) == program
