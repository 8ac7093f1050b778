"""A local OTLP/gRPC receiver for traces, for a look at a run without a backend, and for this package's tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class ReceivedSpan:
    """One span as it arrived; times in nanoseconds since the epoch, ids in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty for a root
    start: int
    end: int
    attributes: dict[str, Any]
    links: list[str]  # ids of the linked spans
    status: str  # UNSET, OK or ERROR
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]
    scope: str
    parent: ReceivedSpan | None = None
    children: list[ReceivedSpan] = field(default_factory=list)

    @property
    def duration_ms(self) -> float:
        return (self.end - self.start) / 1e6


class Receiver:
    """Listens on a free loopback port while used as a context manager; `spans` is what has arrived."""

    def __init__(self) -> None:
        self._requests: list[Any] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Receiver:
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=4), options=[("grpc.max_receive_message_length", 256 * 1024 * 1024)]
        )
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(grace=None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        """The service's one method; the name is the protocol's."""
        with self._lock:
            self._requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Everything received so far, by start, each span tied to its parent."""
        with self._lock:
            requests = list(self._requests)
        spans = [span for request in requests for span in _spans_of(request)]
        spans.sort(key=lambda span: (span.start, -span.end))
        by_id = {(span.trace_id, span.span_id): span for span in spans}
        for span in spans:
            span.parent = by_id.get((span.trace_id, span.parent_id))
            if span.parent is not None:
                span.parent.children.append(span)
        return spans


def _spans_of(request: Any) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            attributes=_attributes_of(span.attributes),
            links=[link.span_id.hex() for link in span.links],
            status=("UNSET", "OK", "ERROR")[span.status.code],
            events=[(event.name, _attributes_of(event.attributes)) for event in span.events],
            resource=_attributes_of(resource_spans.resource.attributes),
            scope=scope_spans.scope.name,
        )
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
