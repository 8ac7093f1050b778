import sys

import pytest

from megatron_autoinstrument.export import providers
from megatron_autoinstrument.tools import cli
from megatron_autoinstrument.tools.receiver import Receiver

PROGRAM = """
import os
from megatron_autoinstrument.export import providers
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import FREQUENT, LIVE
RECORDER.connect_by(lambda: providers.connect({"traces": None}, None, {"dl.rank": 0}))
for iteration in range(1, 4):
    step = RECORDER.begin("megatron.train_step", LIVE, {"megatron.iteration": iteration})
    forward = RECORDER.begin("megatron.microbatch.forward", FREQUENT, {"megatron.microbatch_id": 0})
    RECORDER.end(RECORDER.begin("megatron.layer.forward", FREQUENT))
    RECORDER.end(forward)
    both = ["megatron.p2p.send_forward", "megatron.p2p.recv_backward"]
    RECORDER.end_together(RECORDER.begin_together(both, {"megatron.p2p.combined": True}), None)
    RECORDER.end(step)
print("trained")
"""


def test_show_runs_a_command_and_shows_one_of_its_steps(capfd):
    assert cli.main(["show", "--", sys.executable, "-c", PROGRAM]) == 0
    shown = capfd.readouterr().out
    assert "15 spans from 1 rank, 3 training iterations." in shown
    assert "Iteration 2 as it ran" in shown
    assert "p2p.send_forward + recv_backward" in shown
    assert shown.count("recv_backward") == 1
    assert "microbatch.forward 0" in shown
    assert "layer.forward" not in shown  # too fine for a page


def test_show_asks_no_proxy_for_this_machine(capfd, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert cli.main(["show", "--", sys.executable, "-c", PROGRAM]) == 0
    assert "15 spans from 1 rank" in capfd.readouterr().out


def test_show_hands_on_the_commands_status_and_the_end_of_its_output(capfd):
    assert cli.main(["show", "--", sys.executable, "-c", "print('why'); raise SystemExit(3)"]) == 3
    shown = capfd.readouterr().out
    assert "why" in shown
    assert "ended with status 3" in shown
    assert "Nothing was recorded" in shown


@pytest.mark.parametrize("command", [[], ["no-such-command"]])
def test_show_refuses_what_it_cannot_run(command, capfd):
    with pytest.raises(SystemExit) as left:
        cli.main(["show", "--", *command])
    assert left.value.code == 2
    assert "command" in capfd.readouterr().err


def test_the_receiver_ties_spans_to_their_parents(provider):
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    with Receiver() as receiver:
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=receiver.endpoint)))
        tracer = providers.connect({"traces": provider}, None, {"dl.rank": 3}).tracer
        with (
            tracer.start_as_current_span("outer", attributes={"a": 1, "b": "x", "c": True}),
            pytest.raises(KeyError),
            tracer.start_as_current_span("inner"),
        ):
            raise KeyError
        outer, inner = receiver.spans
        provider.shutdown()
    assert inner.parent is outer
    assert outer.children == [inner]
    assert outer.attributes == {"a": 1, "b": "x", "c": True}
    assert inner.status == "ERROR"
    assert inner.events[0][0] == "exception"
    assert outer.resource["dl.rank"] == 3
