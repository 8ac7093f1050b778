"""Providers of other people's packages: used, never replaced, and nothing of theirs stops working."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from megatron_autoinstrument.tools.receiver import Receiver

VENDORS = Path(sys.prefix) / "vendors"  # see the Makefile
pytestmark = pytest.mark.skipif(not VENDORS.exists(), reason=f"no {VENDORS}: see the Makefile")

RECORD = """
import random
from megatron_autoinstrument.export import providers
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import FREQUENT, LIVE

def record(*signals):
    state = random.getstate()
    RECORDER.connect_by(lambda: providers.connect(dict.fromkeys(signals), None, {"dl.rank": 3}))
    for _ in range(2):
        step = RECORDER.begin("megatron.train_step", LIVE)
        RECORDER.end(RECORDER.begin("megatron.microbatch.forward", FREQUENT))
        RECORDER.end(step)
    assert random.getstate() == state
    assert not providers._built
"""
OURS = {("megatron.train_step", 3): 2, ("megatron.microbatch.forward", 3): 2}


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", RECORD + code],
        env={**os.environ, "PYTHONPATH": str(VENDORS), "no_proxy": "127.0.0.1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("batch", [True, False])
def test_phoenix_keeps_the_exporter_that_it_drops_for_the_first_processor_of_the_application(batch):
    with Receiver() as receiver:
        out, err = run(
            f"""
import os
from opentelemetry import trace
from phoenix.otel import register
from opentelemetry.sdk.trace import SpanProcessor

provider = register(
    endpoint=os.environ["ENDPOINT"], protocol="grpc", batch={batch}, verbose=False, project_name="p"
)
tracer = trace.get_tracer("app")
tracer.start_span("app.before").end()
record("traces")
tracer.start_span("app.after").end()
provider.force_flush()
# The application's own first processor replaces it, as without us.
provider.add_span_processor(SpanProcessor())
tracer.start_span("app.replaced").end()
print([type(processor).__name__ for processor in provider._active_span_processor._span_processors])
""",
            ENDPOINT=receiver.endpoint,
        )
        spans = Counter((span.name, span.resource.get("dl.rank")) for span in receiver.spans)
    assert spans == {**OURS, ("app.before", None): 1, ("app.after", 3): 1}
    assert out == "['_WatchingProcessor', 'SpanProcessor']\n"
    assert not err


LOGFIRE = """
import logfire, logging
from opentelemetry import trace
from opentelemetry._logs import get_logger_provider
from opentelemetry.metrics import get_meter_provider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

def configure():
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    logfire.configure(
        send_to_logfire=False, console=False, inspect_arguments=False,
        additional_span_processors=[SimpleSpanProcessor(spans)],
        metrics=logfire.MetricsOptions(additional_readers=[reader]),
    )
    return spans, reader

def got(exporter):
    for span in exporter.get_finished_spans():
        if span.attributes.get("logfire.span_type") != "pending_span":
            print(span.name, span.resource.attributes.get("dl.rank"))
"""


def test_logfires_providers_are_used_though_they_are_called_proxies():
    out, err = run(
        LOGFIRE
        + """
exporter, reader = configure()
logfire.info("app.before")
record("traces", "metrics", "logs")
RECORDER.meter.create_counter("steps").add(1)
logfire.info("app.after")
logfire.force_flush()
got(exporter)
connection = RECORDER._connection
assert connection._providers["traces"] is trace.get_tracer_provider()
assert connection._providers["metrics"] is get_meter_provider()
assert connection._providers["logs"] is get_logger_provider()
(resource,) = reader.get_metrics_data().resource_metrics
assert "steps" in [metric.name for scope in resource.scope_metrics for metric in scope.metrics]
assert resource.resource.attributes["dl.rank"] == 3
"""
    )
    assert Counter(out.splitlines()) == {
        "app.before None": 1,
        "megatron.train_step 3": 2,
        "megatron.microbatch.forward 3": 2,
        "app.after 3": 1,
    }
    assert not err


def test_logfire_may_be_configured_again():
    """It shuts its provider down and puts another into the one that is global."""
    out, err = run(
        LOGFIRE
        + """
configure()
record("traces")
RECORDER.drain()
exporter, _ = configure()
RECORDER.drain()
RECORDER.end(RECORDER.begin("megatron.train_step", LIVE))
RECORDER.drain()
got(exporter)
"""
    )
    assert out == "megatron.train_step 3\n"
    assert not err


def test_datadogs_spans_reach_its_agent():
    received = []

    class Agent(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            received.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            answer = json.dumps({"endpoints": ["/v0.4/traces", "/v0.5/traces"], "rate_by_service": {}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Agent)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        _, err = run(
            """
from ddtrace.opentelemetry import TracerProvider
from opentelemetry import trace

trace.set_tracer_provider(TracerProvider())
tracer = trace.get_tracer("app")
tracer.start_span("app.before").end()
record("traces")
tracer.start_span("app.after").end()
assert RECORDER._connection._providers["traces"] is trace.get_tracer_provider()
""",
            DD_TRACE_AGENT_URL=f"http://127.0.0.1:{server.server_port}",
            DD_INSTRUMENTATION_TELEMETRY_ENABLED="0",
            DD_REMOTE_CONFIGURATION_ENABLED="0",
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    # Names are in a table of texts, once each.
    for name in ("app.before", "app.after", "megatron.train_step", "megatron.microbatch.forward"):
        assert any(name.encode() in body for body in received), err
    assert not err
