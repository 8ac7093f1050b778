"""The check for a machine with a GPU, as far as it can be tried on one without."""

import os
import subprocess
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from harness import ROOT

SCRIPT = ROOT / "tests" / "device" / "check.py"
LOGGED, MORE = "megatron/training/training.py:2878 training_log", "torch/optim/optimizer.py:102 _get_value"
READ = "megatron_autoinstrument/targets/training.py:220 _average_loss"


def check(*words, **environment):
    """Runs it."""
    return subprocess.run(
        [sys.executable, SCRIPT, *words], env={**os.environ, **environment}, capture_output=True, text=True
    )


def loaded():
    spec = spec_from_file_location("device_check", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_nothing_is_checked_and_it_says_so():
    done = check(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout[:21]) == (3, "There is no GPU here:")


def test_a_part_that_there_is_none_of_is_named():
    done = check("stepps")
    assert (done.returncode, "stepps" in done.stdout) == (2, True)


def test_on_the_cpu_a_step_waits_where_it_did_without_us():
    done = check("--on-cpu", "steps")
    assert "steps: ok: 8 steps, the same losses; " in done.stdout, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ({LOGGED: 6, MORE: 9}, []),
        ({LOGGED: 6, MORE: 8}, []),  # less often
        ({LOGGED: 6, MORE: 9, READ: 6}, []),  # the loss, once after each time that Megatron has read it
        ({LOGGED: 6, MORE: 9, READ: 7}, [f"{READ} (1 times)"]),
        ({LOGGED: 6, MORE: 11}, [f"{MORE} (2 times)"]),
        ({LOGGED: 6, "elsewhere": 1}, ["elsewhere (1 times)"]),
        ({"megatron_autoinstrument/metrics.py:9 record": 1}, ["megatron_autoinstrument/metrics.py:9 record (1 times)"]),
    ],
)
def test_a_wait_that_is_new_or_comes_more_often_is_found(after, found):
    assert loaded().added(Counter({LOGGED: 6, MORE: 9}), Counter(after)) == found
