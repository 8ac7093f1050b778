"""Collectors that fail, each in a way of its own: context managers that give an endpoint."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Endpoint(str):
    """An URL."""

    __slots__ = ("taken",)
    taken: list[int]
    """How many spans came with each Export, in this order; empty where none comes in."""


_NAME = "opentelemetry.proto.collector.{0}.v1.{1}Service"
_SERVICES = [_NAME.format(signal, signal.capitalize()) for signal in ("trace", "metrics", "logs")]


@contextmanager
def absent() -> Iterator[Endpoint]:
    """No packet is answered: the queue of connections not yet accepted is full."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for filling in (first, second):
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        yield _endpoint(listening.getsockname()[1])


@contextmanager
def refusing() -> Iterator[Endpoint]:
    """Nobody listens on the port, and nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield _endpoint(bound.getsockname()[1])


@contextmanager
def mute() -> Iterator[Endpoint]:
    """Takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield _endpoint(listening.getsockname()[1])


@contextmanager
def never_answering() -> Iterator[Endpoint]:
    """Speaks gRPC, and answers no Export."""
    stopped = threading.Event()
    with _serving(lambda request: stopped.wait()) as (endpoint, _):
        yield endpoint
        stopped.set()


@contextmanager
def slow() -> Iterator[Endpoint]:
    """Takes 1.5 s for an Export."""
    with _serving(lambda request: time.sleep(1.5)) as (endpoint, _):
        yield endpoint


@contextmanager
def rejecting_by_size() -> Iterator[Endpoint]:
    """Takes no message of more than 500 bytes, which is less than a resource: RESOURCE_EXHAUSTED."""
    with _serving(lambda request: None, ("grpc.max_receive_message_length", 500)) as (endpoint, _):
        yield endpoint


@contextmanager
def dying() -> Iterator[Endpoint]:
    """Takes one Export, and is gone: in mid-run, where spans are exported that soon."""
    taken = threading.Event()
    with _serving(lambda request: taken.set()) as (endpoint, server):
        threading.Thread(target=lambda: (taken.wait(), time.sleep(0.2), server.stop(0)), daemon=True).start()
        yield endpoint
        taken.set()


def _endpoint(port: int) -> Endpoint:
    endpoint = Endpoint(f"http://127.0.0.1:{port}")
    endpoint.taken = []
    return endpoint


@contextmanager
def _serving(export: Callable[[bytes], Any], *options: tuple[str, int]) -> Iterator[tuple[Endpoint, grpc.Server]]:
    """A server that does `export` for an Export of any signal and then answers that all is well."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=options)
    endpoint = _endpoint(server.add_insecure_port("127.0.0.1:0"))

    def answer(request: bytes, context: Any) -> bytes:
        export(request)
        return b""

    def answer_traces(request: bytes, context: Any) -> bytes:
        resources = ExportTraceServiceRequest.FromString(request).resource_spans
        endpoint.taken.append(sum(len(scope.spans) for resource in resources for scope in resource.scope_spans))
        return answer(request, context)

    for service in _SERVICES:
        method = grpc.unary_unary_rpc_method_handler(answer_traces if "Trace" in service else answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    server.start()
    try:
        yield endpoint, server
    finally:
        server.stop(grace=0).wait()
