"""A local OTLP/gRPC receiver for traces, metrics and logs, for a look at a run without a backend, and for tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
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


@dataclass
class ReceivedPoint:
    """One data point of a metric as it arrived."""

    name: str
    kind: str  # gauge, sum or histogram
    unit: str
    value: float  # of a histogram, its sum
    count: int  # of a histogram
    bounds: list[float]  # of a histogram
    time: int  # nanoseconds since the epoch
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class ReceivedLog:
    """One log record as it arrived."""

    logger: str
    severity: str
    body: str
    span_id: str  # empty outside of any span
    resource: dict[str, Any]


class Receiver:
    """Listens on a free loopback port while used as a context manager; `spans`, `points` and `logs` are what has
    arrived."""

    def __init__(self) -> None:
        self._received: dict[str, list[Any]] = {"spans": [], "metrics": [], "logs": []}
        self._lock = threading.Lock()

    def __enter__(self) -> Receiver:
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=4), options=[("grpc.max_receive_message_length", 256 * 1024 * 1024)]
        )
        traces = _Service(self._keeper("spans", trace_service_pb2.ExportTraceServiceResponse))
        metrics = _Service(self._keeper("metrics", metrics_service_pb2.ExportMetricsServiceResponse))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(traces, self._server)  # type: ignore[no-untyped-call]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, self._server)  # type: ignore[no-untyped-call]
        logs = _Service(self._keeper("logs", logs_service_pb2.ExportLogsServiceResponse))
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(logs, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(grace=None).wait()

    def _keeper(self, what: str, response: Any) -> Any:
        def keep(request: Any, context: Any) -> Any:
            with self._lock:
                self._received[what].append(request)
            return response()

        return keep

    def _requests(self, what: str) -> list[Any]:
        with self._lock:
            return list(self._received[what])

    @property
    def points(self) -> list[ReceivedPoint]:
        """Every data point received so far, by time."""
        points = [point for request in self._requests("metrics") for point in _points_of(request)]
        return sorted(points, key=lambda point: point.time)

    @property
    def logs(self) -> list[ReceivedLog]:
        """Every log record received so far."""
        return [
            ReceivedLog(
                logger=scope_logs.scope.name,
                severity=record.severity_text,
                body=record.body.string_value,
                span_id=record.span_id.hex(),
                resource=_attributes_of(resource_logs.resource.attributes),
            )
            for request in self._requests("logs")
            for resource_logs in request.resource_logs
            for scope_logs in resource_logs.scope_logs
            for record in scope_logs.log_records
        ]

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Everything received so far, by start, each span tied to its parent."""
        spans = [span for request in self._requests("spans") for span in _spans_of(request)]
        spans.sort(key=lambda span: (span.start, -span.end))
        by_id = {(span.trace_id, span.span_id): span for span in spans}
        for span in spans:
            span.parent = by_id.get((span.trace_id, span.parent_id))
            if span.parent is not None:
                span.parent.children.append(span)
        return spans


class _Service:
    """A collector's service of one signal; its one method has the protocol's name."""

    def __init__(self, export: Any) -> None:
        self.Export = export


def _points_of(request: Any) -> list[ReceivedPoint]:
    found = []
    for resource_metrics in request.resource_metrics:
        resource = _attributes_of(resource_metrics.resource.attributes)
        for metric in (metric for scope in resource_metrics.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                histogram = kind == "histogram"
                found.append(
                    ReceivedPoint(
                        name=metric.name,
                        kind=kind,
                        unit=metric.unit,
                        value=point.sum if histogram else getattr(point, point.WhichOneof("value")),
                        count=point.count if histogram else 1,
                        bounds=list(point.explicit_bounds) if histogram else [],
                        time=point.time_unix_nano,
                        attributes=_attributes_of(point.attributes),
                        resource=resource,
                    )
                )
    return found


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
