"""What is patched on which rank, what uninstrument() leaves behind, and what a fault of ours costs."""

import json
import re
from collections import Counter
from functools import cache

import pytest
from harness import EVERYTHING, PLAIN, PTH, SCRIPTS, plain_losses, train

from megatron_autoinstrument.common.groups import GROUPS

PIPELINE = ("--pipeline-model-parallel-size", "2")


def results(run):
    assert run.status == 0, run.output[-3000:]
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(part.lstrip())[0] for part in run.output.split("PROCESS STATE")[1:]]


@cache
def restored(control):
    environment = {**EVERYTHING, "CONTROL": str(int(control)), "LATE_MODULE": "megatron.core.export.export_config"}
    (result,) = results(train(ranks=1, way=PLAIN, script=SCRIPTS / "restore.py", environment=environment))
    return result


def test_uninstrument_puts_back_every_attribute_of_megatron_and_every_global_of_the_script():
    result, control = restored(False), restored(True)
    assert result["patched"] > 20
    assert result["different_while_installed"] >= result["patched"]
    assert result["new_modules"]  # some were imported in between
    assert result["wrappers_left"] == []
    assert result["not_as_before"] == control["not_as_before"]


def test_what_is_patched_copies_pickles_compares_and_inspects_as_its_original():
    assert restored(False)["problems"] == []


def test_with_any_group_off_or_alone_every_function_that_it_has_no_need_of_is_the_very_object_it_was():
    settings = restored(False)["settings"]
    assert len(settings) == 2 * len(GROUPS) + 2
    for name, found in settings.items():
        assert found["replaced"] == found["needed"], name
        assert (found["besides"], found["left"]) == ([], []), name
    for name in ("turned off", "a rank that doesn't export"):
        assert settings[name]["replaced"] == [*("add_megatron_arguments", "initialize_model_parallel", "set_args")]
    # The groups of a step need the step itself; that it logs is for its own alone, and for the metrics.
    assert "train_step" in settings["optimizer alone"]["replaced"]
    assert "training_log" not in settings["all but step"]["replaced"]


# Megatron exits on a flag that it doesn't know, on any rank; and which rank it is turns out late. None runs per step.
FLAGS_ONLY = [
    "megatron.core.parallel_state.initialize_model_parallel",
    "megatron.training.arguments.add_megatron_arguments",
    "megatron.training.global_vars.set_args",
]


@cache
def by_default():
    run = train(*PIPELINE, way=PTH, script=SCRIPTS / "inspect_rank.py", environment={})
    return run, sorted(results(run), key=lambda result: result["rank"])


def test_by_default_the_last_rank_alone_exports():
    run, _ = by_default()
    assert run.ranks == [1]
    assert run.counts(1) == {
        "megatron.pretrain": 1,
        "megatron.train": 1,
        "megatron.evaluate": 4,
        "megatron.evaluate.step": 8,
    }
    assert run.losses == plain_losses(*PIPELINE)


def test_a_rank_that_does_not_export_has_no_patch_but_for_flags_no_provider_no_handler_and_no_thread_of_ours():
    _, (first, last) = by_default()
    assert (first["sigterm"], last["sigterm"]) == (False, True)
    assert first["patched"] == FLAGS_ONLY
    assert first["ledger"] == len(FLAGS_ONLY) - 1  # the flags have a ledger of their own
    assert first["provider"] == "ProxyTracerProvider"
    assert not first["sdk"]
    assert not [name for name in first["threads"] if "autoinstrument" in name or "Otel" in name]


def test_not_one_function_of_ours_runs_in_a_step_of_a_rank_that_does_not_export_on_any_thread():
    _, (first, last) = by_default()
    assert first["calls"] == {}
    assert last["calls"]["MainThread"]["_wrap.<locals>.wrapper"] >= 5  # the counting works


def test_by_default_nothing_that_runs_per_step_is_patched_but_what_evaluation_and_metrics_need():
    _, (_, last) = by_default()
    assert {name.rpartition("megatron.")[2] for name in last["patched"]} == {
        "training.arguments.add_megatron_arguments",
        "training.global_vars.set_args",
        "core.parallel_state.initialize_model_parallel",
        "training.training.pretrain",
        "training.training.setup_model_and_optimizer",
        "training.training.train",
        "training.training.evaluate",
        "training.checkpointing.save_checkpoint",
        "training.checkpointing.generate_state_dict",
        "training.async_utils.schedule_async_save",
        "core.dist_checkpointing.serialization.save",
        # An evaluation's step is a run of one of these, and they run in training too.
        "core.pipeline_parallel.schedules.forward_backward_no_pipelining",
        "core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving",
        "core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving",
        "core.full_cuda_graph.FullCudaGraphWrapper.__call__",
        # Megatron's log, in every step, and what it reads when it does log.
        "training.training.training_log",
        "training.one_logger_utils.track_e2e_metrics",
        "core.timers.Timer.elapsed",
    }
    assert last["provider"] == "TracerProvider"


@cache
def with_faults():
    return train(*PIPELINE, way=PLAIN, script=SCRIPTS / "with_faults.py")


def test_a_fault_of_ours_never_reaches_training():
    run = with_faults()
    assert run.status == 0, run.output[-3000:]
    assert run.losses == plain_losses(*PIPELINE)


def test_a_fault_of_ours_costs_its_seam_and_one_message():
    run = with_faults()
    off = Counter(re.findall(r"WARNING Recording of megatron\S*?(\w+) failed and is off", run.output))
    assert off == {
        "forward_step": 2,  # once on each rank
        "evaluate": 2,
        "send_forward": 1,  # the last stage sends nothing forward
        "send_forward_recv_backward": 1,
    }
    assert " WARNING 3 spans were dropped" in run.output  # those that their own end failed to close
    for rank in run.ranks:
        counts = run.counts(rank)
        assert "megatron.microbatch.forward" not in counts
        assert counts["megatron.microbatch.backward"] == 24
        assert counts["megatron.train_step"] == 6


@pytest.mark.parametrize("name", ["training.training.no_such_function", "schedules.NoSuchClass.step"])
def test_a_seam_that_this_megatron_lacks_is_reported_once_on_each_rank_and_costs_nothing(name):
    lines = [line for line in with_faults().ours() if name in line]
    assert len(lines) == 2
    assert all(" INFO This Megatron has no megatron." in line for line in lines)
