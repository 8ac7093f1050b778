"""Exporters that retry: they jitter their waits, and training's random state, which is Python's, stays where it is."""

import http.server
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

# Folders with another OpenTelemetry than the one installed, for PYTHONPATH; see the Makefile. TEST_OTLP names more.
FOLDERS = [Path(sys.prefix) / name for name in ("vendors", "otel-oldest", "otlp-1.44.0")]
FOLDERS += [Path(name) for name in os.environ.get("TEST_OTLP", "").split()]

CODE = """
import logging, random, sys
from megatron_autoinstrument.export import providers
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import FREQUENT

before = random.getstate()
RECORDER.connect_by(lambda: providers.connect({"traces": None, "metrics": None, "logs": None}, None, {}))
RECORDER.end(RECORDER.begin("megatron.microbatch.forward", FREQUENT))
RECORDER.meter.create_counter("steps").add(1)
RECORDER.log_handler.emit(logging.makeLogRecord({"name": "x", "msg": "x", "levelno": logging.INFO}))
sys.stdin.readline()
print(random.getstate() == before, flush=True)
sys.stdin.readline()
"""


@contextmanager
def refusing_over_http(asked):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            asked[self.path] += 1
            self.send_response(503)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def refusing_over_grpc(asked):
    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            asked[details.method] += 1
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            )

    server = grpc.server(ThreadPoolExecutor(4), [Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_collector_that_refuses_leaves_pythons_random_state_alone(folder):
    if not folder.exists():
        pytest.skip(f"no {folder}: see the Makefile")
    with ThreadPoolExecutor() as both:
        assert list(both.map(draw_what, [folder] * 2, REFUSING)) == [["traces", "metrics", "logs", "True"]] * 2


REFUSING = {"grpc": refusing_over_grpc, "http/protobuf": refusing_over_http}


def draw_what(folder, protocol):
    """Which signals asked again, and whether the random state of the process that exports is what it was."""
    asked = Counter()
    with REFUSING[protocol](asked) as port:
        child = subprocess.Popen(
            [sys.executable, "-c", CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(folder),
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
                "OTEL_BSP_SCHEDULE_DELAY": "100",
                "OTEL_BLRP_SCHEDULE_DELAY": "100",
                "OTEL_METRIC_EXPORT_INTERVAL": "100",
                "no_proxy": "127.0.0.1",
            },
        )
        deadline = time.monotonic() + 60
        # Who asks again has waited, and drawn for how long.
        while (len(asked) < 3 or min(asked.values()) < 2) and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.05)
        if child.poll() is None:
            child.stdin.write("\n")
            child.stdin.flush()
        said = child.stdout.readline().strip()
        child.kill()
        _, err = child.communicate()
    # What is asked for is called ...v1.trace.TraceService/Export, or /v1/traces.
    twice = [ask for ask, times in asked.items() if times > 1]
    again = [name for name in ("traces", "metrics", "logs") if any(name[:4] in ask for ask in twice)]
    print(folder, protocol, asked, err)
    return [*again, said]
