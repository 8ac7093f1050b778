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

_NAME = "opentelemetry.proto.collector.{0}.v1.{1}Service"
_SERVICES = [_NAME.format(signal, signal.capitalize()) for signal in ("trace", "metrics", "logs")]


@contextmanager
def absent() -> Iterator[str]:
    """No packet is answered: the queue of connections not yet accepted is full."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for filling in (first, second):
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        yield _endpoint(listening)


@contextmanager
def refusing() -> Iterator[str]:
    """Nobody listens on the port, and nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield _endpoint(bound)


@contextmanager
def mute() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield _endpoint(listening)


@contextmanager
def never_answering() -> Iterator[str]:
    """Speaks gRPC, and answers no Export."""
    stopped = threading.Event()
    with _serving(lambda request: stopped.wait()) as (endpoint, _):
        yield endpoint
        stopped.set()


@contextmanager
def slow() -> Iterator[str]:
    """Takes 1.5 s for an Export."""
    with _serving(lambda request: time.sleep(1.5)) as (endpoint, _):
        yield endpoint


@contextmanager
def rejecting_by_size() -> Iterator[str]:
    """Takes no message of more than 1000 bytes: RESOURCE_EXHAUSTED."""
    with _serving(lambda request: None, ("grpc.max_receive_message_length", 1000)) as (endpoint, _):
        yield endpoint


@contextmanager
def dying() -> Iterator[str]:
    """Takes one Export, and is gone: in mid-run, where spans are exported that soon."""
    taken = threading.Event()
    with _serving(lambda request: taken.set()) as (endpoint, server):
        threading.Thread(target=lambda: (taken.wait(), time.sleep(0.2), server.stop(0)), daemon=True).start()
        yield endpoint
        taken.set()


def _endpoint(bound: socket.socket) -> str:
    return f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def _serving(export: Callable[[bytes], Any], *options: tuple[str, int]) -> Iterator[tuple[str, grpc.Server]]:
    """A server that does `export` for an Export of any signal and then answers that all is well."""

    def answer(request: bytes, context: Any) -> bytes:
        export(request)
        return b""

    method = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=options)
    for service in _SERVICES:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.stop(grace=0).wait()
