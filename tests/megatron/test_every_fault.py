"""Every function of the package that runs in a training process fails in turn; training does not notice."""

import re
from functools import cache

from harness import EVERYTHING, PLAIN, SCRIPTS, train

OPTIONS = (
    *("--pipeline-model-parallel-size", "2", "--train-iters", "430", "--num-layers", "2", "--global-batch-size", "2"),
    *("--eval-interval", "1", "--eval-iters", "1"),
)
# They run once in a process, and did so before their turn came; or in our thread, where this way of failing misses
# them.
ONCE = {"autoload.py:forget", "metrics.py:_create", "ranks.py:records.<locals>.<genexpr>"}
ONCE |= {"spans.py:Spans._emit", "spans.py:_context_of"}
ONCE |= {"direct.py:Live.is_recording"}  # after an earlier fault there, spans are the tracer's
ONCE |= {
    "outbox.py:Outbox._hand_on",
    "spans.py:Spans._start",
}  # each half second, which may be in another step
# What is known by now.
ONCE |= {f"encode.py:{name}" for name in ("_name", "_add_name", "_add_key", "_float", "_key_value", "_varint")}
ONCE |= {f"journal.py:{name}" for name in ("_is_number", "_line", "Journal.kind", "_Shapes._shape")}
ONCE |= {"journal.py:_Shapes._shape.<locals>.<genexpr>"}
ONCE |= {
    "record.py:Record.anchor",
    "record.py:Record.start",
}  # under megatron.train alone, whose record an earlier fault may have ended
# What fails in our own threads is told once in a process, not each time.
IN_OUR_THREADS = re.compile(
    r"autoload\.py:_BeforeMegatron\.find_spec$|"  # fails an import, which is told by whoever imports
    r"losses\.py:|providers\.py:|signals\.py:(Termination\.(_watch|_is_current|_ends|_flush)|_next|_set_action)$|"
    r"ids\.py:(PrivateIdGenerator|keep_random)|direct\.py:|sdk_internals\.py:|traces\.py:|"
    r"outbox\.py:|spans\.py:(Spans\.(_emit|_start|_place)|_context_of|mark|_links_around)|"
    r"recorder\.py:Recorder\.(_is_lost|_still_open|_connect_now\.)|record\.py:Record\.(start|end)$|"
    r"finite\.py:(is_)?finite(\.|$)|metrics\.py:_create\.|encode\.py:"
)
ALL_SIGNALS = {
    **EVERYTHING,
    "MEGATRON_OTEL_LOGS_ENABLED": "1",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "otlp",
}


@cache
def faulty():
    run = train(*OPTIONS, script=SCRIPTS / "with_every_fault.py", environment=ALL_SIGNALS, timeout_s=900)
    assert run.status == 0, run.output[-3000:]
    return run


@cache
def faults():
    """(function, how often it raised, how many messages there were, the first of them), of both ranks."""
    return re.findall(r"FAULT (\S+) hit=(\d+) said=(\d+) \[(.*?)\](?=\s|FAULT|$)", faulty().output)


def test_every_function_has_failed_and_training_went_on_to_its_end():
    assert faulty().output.count("NOT REACHED 0") == 2
    failed = {name for name, hit, *_ in faults() if int(hit)}
    assert len(failed) > 150
    assert {name for name, *_ in faults()} - failed <= ONCE


def test_the_losses_are_those_of_an_uninstrumented_run():
    plain = train(*OPTIONS, way=PLAIN, environment={"MEGATRON_OTEL_ENABLED": "0"})
    assert plain.status == 0, plain.output[-3000:]
    assert len(plain.losses) > 500
    assert faulty().losses == plain.losses


def test_each_failure_is_reported_and_names_the_part_that_is_off():
    for name, hit, said, first in faults():
        if int(hit):
            if int(said) == 0:
                assert IN_OUR_THREADS.match(name), name
                continue
            assert re.match(
                r"['\"](Recording of [\w.]+ failed and is off|Could not (instrument|take the instr)|Signals can't|"
                r"Switching the instrumentation failed|"
                r"Which rank this is can't be added|A log record could not be exported|"
                r"What the application does to its providers can't be followed|Spans are (made|encoded) by|"
                r"A span was lost|"
                r"OpenTelemetry could not be set up|No (traces|metrics|logs) are recorded|"
                r"Exporting [\w ]+ failed|Exporting [\w ]+ took too long|\d+ spans were dropped)",
                first,
            ), (name, first)
