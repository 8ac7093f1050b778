import logging
import os
import re
import threading
import time

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, ConsoleLogExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    InMemoryMetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megatron_autoinstrument.export import losses, providers
from megatron_autoinstrument.recording import outbox, workers
from megatron_autoinstrument.recording.record import FREQUENT, LIVE
from megatron_autoinstrument.recording.recorder import Recorder

logger = logging.getLogger(__name__)


class Collector(SpanExporter):
    """An exporter that does as its collector does, and logs like the SDK's."""

    def __init__(self, refuses=False, raises=False):
        self.refuses, self.raises = refuses, raises
        self.got = 0
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def export(self, batch):
        self.asked.set()
        self.answers.wait()
        if self.raises:
            raise OSError("no route")
        if self.refuses:
            logger.warning("Transient error %s", "UNAVAILABLE")
            logger.error("Failed to export")
            return SpanExportResult.FAILURE
        self.got += len(batch)
        return SpanExportResult.SUCCESS


@pytest.fixture
def connected(monkeypatch):
    """Connects a recorder, and metrics, to providers that export by these exporters."""
    monkeypatch.setattr(providers, "_APPLICATIONS_EXIT_TIMEOUT_S", 0.4)
    monkeypatch.setattr(outbox, "_OTHERS_S", 0.2)
    recorder, reader, collectors = Recorder(), InMemoryMetricReader(), []

    def connect(*exporters, queue=2048):
        collectors.extend(exporters)
        provider = TracerProvider(shutdown_on_exit=False)
        for exporter in exporters:
            provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=queue, max_export_batch_size=queue))
        given = {"traces": provider, "metrics": MeterProvider([reader], shutdown_on_exit=False)}
        recorder.connect_by(lambda: providers.connect(given, None, {}))
        return recorder, reader, provider

    yield connect
    for collector in collectors:
        collector.answers.set()
    recorder.disconnect()
    recorder.reset_after_fork()


def record(recorder, number, kind=FREQUENT):
    for _ in range(number):
        recorder.end(recorder.begin("megatron.microbatch.forward", kind))


def counted(reader):
    data = reader.get_metrics_data()
    metrics = [metric for scope in data.resource_metrics[0].scope_metrics for metric in scope.metrics] if data else []
    return {metric.name: metric.data.data_points[0].value for metric in metrics}.get("megatron.otel.spans_dropped", 0)


def messages(caplog):
    return [log.getMessage() for log in caplog.records if log.levelno >= logging.WARNING]


def test_what_an_exporter_says_of_its_trouble_is_let_through_once(connected, caplog):
    recorder, _, provider = connected(Collector(refuses=True))
    for _ in range(3):
        record(recorder, 1)
        recorder.drain()
        provider.force_flush()
    (message,) = messages(caplog)
    assert message.startswith("Transient error UNAVAILABLE (Told once")


@pytest.mark.parametrize("silent", ["raises", "says nothing"])
def test_an_exporter_that_fails_without_a_word_is_told_of_once(connected, caplog, monkeypatch, silent):
    recorder, _, provider = connected(Collector(raises=silent == "raises", refuses=True))
    monkeypatch.setattr(logger, "disabled", True)
    for _ in range(3):
        record(recorder, 1)
        recorder.drain()
        provider.force_flush()
    (message,) = messages(caplog)
    reason = "OSError: no route" if silent == "raises" else "the exporter reports a failure"
    assert message.startswith(f"Exporting traces failed: {reason} (Told once")
    assert recorder._connection.lost(final=False) == 3


def test_other_exporters_and_released_ones_are_neither_silenced_nor_counted(connected, caplog):
    exporter, other = Collector(refuses=True), Collector(refuses=True)
    recorder, _, _ = connected(exporter)
    record(recorder, 1)
    assert isinstance(exporter.export, losses.Export)
    recorder.flush()
    caplog.clear()
    for _ in range(2):
        other.export(())
    assert len(messages(caplog)) == 4
    recorder.disconnect()
    assert "export" not in vars(exporter)
    exporter.export(())
    assert len(messages(caplog)) == 6
    assert logger.filters == []


def test_an_export_function_of_an_exporters_own_is_put_back(connected):
    exporter = Collector()
    own = exporter.export = lambda batch: SpanExportResult.SUCCESS
    recorder, _, _ = connected(exporter)
    record(recorder, 1)
    assert exporter.export is not own
    recorder.disconnect()
    assert exporter.export is own


def test_what_the_exporter_fails_to_export_is_counted_reported_and_a_metric(connected, caplog):
    exporter = Collector()
    recorder, reader, provider = connected(exporter)
    record(recorder, 5)
    provider.get_tracer("the user's").start_span("x").end()
    assert recorder.flush()
    assert counted(reader) == 0
    exporter.refuses = True
    record(recorder, 7)
    record(recorder, 2, LIVE)
    recorder.exit()
    assert exporter.got == 5 + 1
    assert counted(reader) == 9
    assert "9 spans were dropped: 9 were not exported." in messages(caplog)


def test_the_metric_is_kept_up_to_date_while_training_runs(connected):
    recorder, reader, provider = connected(Collector(refuses=True))
    record(recorder, 3)
    deadline = time.monotonic() + 60
    while not counted(reader) and time.monotonic() < deadline:
        provider.force_flush()
        time.sleep(0.05)
    assert counted(reader) == 3


def test_what_does_not_fit_into_the_sdks_queue_is_told_once_and_counted(connected, caplog):
    exporter = Collector()
    recorder, _, provider = connected(exporter, queue=4)
    record(recorder, 1)
    provider.force_flush()
    exporter.answers.clear()
    record(recorder, 40, LIVE)
    exporter.answers.set()
    provider.force_flush()
    assert recorder._connection.lost(final=False) <= 41 - exporter.got
    assert recorder.flush(final=True)
    assert recorder._connection.lost(final=True) == 41 - exporter.got > 0
    assert len([message for message in messages(caplog) if message.startswith("Queue ")]) <= 1  # some SDKs say nothing


def test_of_several_exporters_the_worst_counts(connected):
    good, bad = Collector(), Collector(refuses=True)
    recorder, _, _ = connected(good, bad)
    record(recorder, 3)
    recorder.flush()
    assert good.got == recorder._connection.lost(final=True) == 3


def test_a_collector_that_never_answers_bounds_memory_and_exit_and_the_metrics_still_leave(
    connected, caplog, monkeypatch
):
    monkeypatch.setattr(outbox, "MAX_WAITING", 600)
    exporter = Collector()
    recorder, reader, _ = connected(exporter)
    exporter.answers.clear()
    for _ in range(10):
        record(recorder, 512)
        assert len(recorder._waiting) <= 600
    assert exporter.asked.wait(10)
    flushed = []
    monkeypatch.setattr(recorder._connection, "flush_others", lambda final: flushed.append(counted(reader)))
    recorder.exit()  # although it never answers
    # What waits, or is on its way, may arrive yet when the metrics leave: the rest is lost for certain.
    assert flushed == [recorder.dropped]
    assert 0 < recorder.dropped < 5120
    (report,) = messages(caplog)
    exported = rf"{5120 - recorder.dropped} were not exported, of which \d+ were on their way and may have arrived"
    assert re.match(f"5120 spans were dropped: {exported}; {recorder.dropped} did not reach the exporter", report)
    assert report.endswith(" What was not exported after 0.4 s was given up.")


@pytest.mark.parametrize("end", ["exit", "a signal"])
def test_what_arrives_while_the_metrics_leave_is_neither_told_nor_counted_as_lost(
    connected, caplog, capfd, monkeypatch, end
):
    """As with a collector that answers after 4.4 s of 5: the metrics leave after 3.5 s."""
    monkeypatch.setattr(providers, "_APPLICATIONS_EXIT_TIMEOUT_S", 30)
    monkeypatch.setattr(outbox, "_OTHERS_S", 29)
    exporter = Collector()
    recorder, reader, _ = connected(exporter)
    exporter.answers.clear()
    record(recorder, 600)
    recorder.begin("megatron.train", LIVE)
    counts = []

    def flush_others(final):
        counts.append(counted(reader))
        exporter.answers.set()

    monkeypatch.setattr(recorder._connection, "flush_others", flush_others)
    recorder.exit() if end == "exit" else recorder.terminate("SIGTERM", lambda: False)
    assert exporter.got == 601
    assert counts == [0] == [counted(reader)]
    assert not messages(caplog)
    assert not capfd.readouterr().err


def test_what_is_counted_as_lost_when_the_metrics_leave_does_not_arrive_afterwards(connected, caplog, monkeypatch):
    monkeypatch.setattr(providers, "_APPLICATIONS_EXIT_TIMEOUT_S", 30)
    monkeypatch.setattr(outbox, "_OTHERS_S", 29)

    class Dead(Collector):
        """It refuses the first batch at once, the second late, and would take the others."""

        def export(self, batch):
            self.refuses = self.refuses and not self.asked.is_set()
            if not self.refuses:
                self.answers.clear()
            return super().export(batch)

    exporter = Dead(refuses=True)
    recorder, reader, _ = connected(exporter, queue=512)
    counts = []

    def flush_others(final):
        counts.append(counted(reader))
        exporter.refuses = True
        exporter.answers.set()

    record(recorder, 1)
    monkeypatch.setattr(recorder._connection, "flush_others", flush_others)
    record(recorder, 2000)
    recorder.exit()
    assert counts == [2001]
    assert exporter.got == 0
    assert "2001 spans were dropped: 2001 were not exported." in messages(caplog)


@pytest.mark.parametrize("end", ["exit", "a signal"])
def test_what_was_on_its_way_at_the_end_is_told_apart(connected, caplog, capfd, end):
    exporter = Collector()
    recorder, _, _ = connected(exporter)
    exporter.answers.clear()
    record(recorder, 7)
    recorder.catch_up(0.01)
    assert exporter.asked.wait(10)
    recorder.exit() if end == "exit" else recorder.terminate("SIGTERM", lambda: False)
    told = " ".join(messages(caplog)) if end == "exit" else capfd.readouterr().err
    assert "7 spans" in told
    assert ", of which 7 were on their way and may have arrived." in told


def test_metrics_that_no_one_takes_bound_the_exit_too(connected, caplog, monkeypatch):
    recorder, _, _ = connected(Collector())
    record(recorder, 1)
    go_on, answered = threading.Event(), []
    monkeypatch.setattr(recorder._connection, "flush_others", lambda final: (go_on.wait(60), answered.append(True)))
    recorder.exit()
    assert not answered
    go_on.set()
    assert messages(caplog) == [
        "Exporting metrics took too long. What was not exported of metrics after 0.4 s was given up."
    ]


@pytest.mark.parametrize("collector", ["answers", "fails", "is slow", "is late"])
def test_somebodys_shutdown_at_exit_passes_over_what_waits_for_a_dead_collector_and_nothing_else(
    connected, monkeypatch, collector
):
    exporter = Collector(refuses=collector == "fails")
    recorder, _, provider = connected(exporter)
    if collector in ("answers", "fails"):
        monkeypatch.setattr(providers, "_APPLICATIONS_EXIT_TIMEOUT_S", 20)
    record(recorder, 1)
    if collector == "is slow":
        exporter.answers.clear()
        threading.Timer(0.3, exporter.answers.set).start()
    if collector == "is late":
        exporter.answers.clear()
    shut_down = []
    memory = InMemorySpanExporter()
    other = BatchSpanProcessor(memory)
    monkeypatch.setattr(exporter, "shutdown", lambda: shut_down.append("the collector's"), raising=False)
    monkeypatch.setattr(memory, "shutdown", lambda: shut_down.append("another"))
    provider.add_span_processor(other)
    recorder.exit()
    provider.shutdown()
    assert shut_down == (["the collector's"] if collector == "answers" else []) + ["another"]
    exporter.answers.set()


def test_a_forked_child_exports_as_without_us_and_counts_nothing(connected):
    exporter = Collector()
    recorder, _, _ = connected(exporter)
    record(recorder, 2)
    assert recorder.flush()
    child = os.fork()
    if child == 0:
        exporter.export([object()])  # not looked at
        os._exit(exporter.got)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_second_connection_reports_what_the_first_one_lost_no_more(connected, caplog):
    exporter = Collector(refuses=True)
    recorder, _, provider = connected(exporter)
    record(recorder, 2)
    recorder.flush()
    recorder.disconnect()
    exporter.refuses = False
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    record(recorder, 3)
    recorder.exit()
    assert exporter.got == 3
    assert [message for message in messages(caplog) if "dropped" in message] == [
        "2 spans were dropped: 2 were not exported."
    ]


def test_a_fault_that_comes_again_and_again_in_our_thread_is_told_of_once(connected, caplog, monkeypatch):
    monkeypatch.setattr(workers, "DRAIN_INTERVAL_S", 0.01)
    recorder, _, _ = connected(Collector())
    record(recorder, 1)
    calls = []
    monkeypatch.setattr(recorder, "drain", lambda: calls.append(1) or 1 / 0)
    while len(calls) < 3:
        time.sleep(0.01)
    assert len(messages(caplog)) == 1


class Closed:
    """A file that takes nothing."""

    def write(self, text):
        raise OSError("no space left")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the exporter's older name
def test_trouble_with_metrics_and_logs_is_told_of_once_too(caplog):
    reader = PeriodicExportingMetricReader(ConsoleMetricExporter(out=Closed()), export_interval_millis=1e9)
    meters, loggers = MeterProvider([reader], shutdown_on_exit=False), LoggerProvider(shutdown_on_exit=False)
    loggers.add_log_record_processor(BatchLogRecordProcessor(ConsoleLogExporter(out=Closed())))
    connection = providers.connect({"metrics": meters, "logs": loggers}, None, {})
    for _ in range(3):
        connection.meter.create_counter("x").add(1)
        connection.log_handler.emit(logging.makeLogRecord({"msg": "x", "levelno": logging.INFO}))
        connection.flush_others()
    told = messages(caplog)
    assert [message.split(":")[0] for message in told] == ["Exporting metrics failed", "Exporting logs failed"]
    assert all(message.endswith("(Told once: training goes on.)") for message in told)  # nothing of spans
    assert all(export.failing for exports in connection._exports.values() for export in exports)
    connection.unhook()


def test_what_is_sent_once_more_after_a_failure_is_not_said_to_have_arrived(connected, caplog):
    class Retries(Collector):
        def export(self, batch):
            logger.warning("Transient error %s", "UNAVAILABLE")
            return super().export(batch)

    exporter = Retries()
    recorder, _, _ = connected(exporter)
    exporter.answers.clear()
    record(recorder, 7)
    recorder.exit()
    assert messages(caplog)[-1].startswith("7 spans were dropped: 7 were not exported.")


def test_where_the_metrics_fail_the_logs_leave_and_the_message_names_no_spans(caplog):
    class Broken(MeterProvider):
        def force_flush(self, timeout_millis=0):
            raise TimeoutError

    flushed = []
    loggers = LoggerProvider(shutdown_on_exit=False)
    loggers.force_flush = lambda: flushed.append(1)
    given = {
        "traces": TracerProvider(shutdown_on_exit=False),
        "metrics": Broken(shutdown_on_exit=False),
        "logs": loggers,
    }
    recorder = Recorder()
    recorder.connect_by(lambda: providers.connect(given, None, {}))
    record(recorder, 1)
    assert not recorder.flush()
    assert flushed == [1]
    assert messages(caplog) == ["Exporting metrics and logs failed; some of it is lost."]
    recorder.disconnect()
    recorder.reset_after_fork()


def test_processors_that_are_not_the_sdks_are_left_alone():
    class Processor:
        _exporter = Collector()

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Processor())
    assert losses.watch_exporters("traces", provider, losses.Tally(), "x") == []
    assert losses.watch_exporters("traces", object(), losses.Tally(), "x") == []
