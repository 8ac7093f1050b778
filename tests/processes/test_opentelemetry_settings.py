"""OpenTelemetry's own variables and its configuration file, whatever they hold, on a Megatron without tensors."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry_variables import SITE, variables

from megatron_autoinstrument.tools.receiver import Receiver

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SCRIPT = HERE / "pretrain_fake.py"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "MEGATRON_", "NEMO_"))}
ON = {"MEGATRON_OTEL_ENABLED": "1", "MEGATRON_OTEL_SPAN_GROUPS": "all", "MEGATRON_OTEL_LOGS_ENABLED": "1"}
SPANS = {"megatron.pretrain", "megatron.model_init", "megatron.train", "megatron.train_step"}


def path(*first):
    return os.pathsep.join(map(str, (*first, ROOT, HERE / "fake")))


def train(*options, script=SCRIPT, python=(sys.executable,), first=(), **environment):
    """A finished process, and the names of the spans that have arrived from it."""
    with Receiver() as receiver:
        done = subprocess.run(
            [*python, script, *options],
            env={
                **PLAIN,
                "PYTHONPATH": path(*first),
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "no_proxy": "127.0.0.1",
                "MEGATRON_OTEL_METRICS_ENABLED": "0",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done, Counter(span.name for span in receiver.spans)


def losses(output):
    return [line for line in output.splitlines() if line.startswith("loss ")]


def messages(output):
    """What was logged: of Megatron's own lines none, and of a report of what was lost none."""
    logged = [line for line in output.splitlines() if line.startswith("LOG ")]
    told = re.compile(r"megatron\.training: step|spans were dropped|Exporting took too long")
    return [line for line in logged if not told.search(line)]


LONG = "%s%n\x01\x1b[31m" + "x,=;" * 3000
NUMBER = re.compile("TIMEOUT|DELAY|SIZE|LIMIT|INTERVAL|_ARG|PORT$")
HOSTILE_NUMBERS = ["0", "-1", "1e400", "nan", "9" * 20, LONG]


def cases():
    """Each variable with a nonsensical value and a hostile one, with SWEEP=all with all of these; and all of them
    empty."""
    known = variables()
    assert len(known) > 60
    for index, name in enumerate(known):
        hostile = HOSTILE_NUMBERS if NUMBER.search(name) else [LONG]
        if os.environ.get("SWEEP") != "all":
            hostile = [hostile[index % len(hostile)]]
        for value in ("no such thing", *hostile):
            yield {name: value}
    at_import = {"OTEL_PROPAGATORS", "OTEL_PYTHON_CONTEXT"}
    elsewhere = {"OTEL_EXPORTER_OTLP_ENDPOINT"}  # unset, it is not where the receiver of this test is
    yield {name: "" for name in known if name not in at_import | elsewhere}
    yield dict.fromkeys(at_import, "")


def test_no_variable_of_opentelemetrys_harms_training_and_each_costs_one_message_per_signal_at_most(tmp_path):
    swept = [{"MEGATRON_OTEL_ENABLED": "0"}, {}, *cases()]
    file = tmp_path / "cases"
    file.write_text(
        "".join(
            json.dumps({"run": f"case{number}", "set": {"NEMO_LENS_RUN_ID": f"case{number}", **case}}) + "\n"
            for number, case in enumerate(swept)
        )
    )
    with Receiver() as receiver:
        done = subprocess.run(
            [sys.executable, SCRIPT, "--cases", file, "--otel-enabled"],
            env={
                **PLAIN,
                **ON,
                "PYTHONPATH": path(),
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "no_proxy": "127.0.0.1",
            },
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,
        )
        arrived = Counter()
        for record in (*receiver.spans, *receiver.logs):
            arrived[record.resource.get("nemo.run.id")] += 1
    assert done.returncode == 0
    reports = {report["run"]: report for report in map(json.loads, done.stdout.splitlines())}
    expected = losses(reports["case0"]["output"])
    assert len(expected) == 3
    assert arrived["case1"] == 9
    assert not messages(reports["case1"]["output"])
    bad = []
    for number, case in enumerate(swept):
        report = reports[f"case{number}"]
        said = messages(report["output"])
        what = {name: value[:40] for name, value in case.items()}
        if report["status"] != 0 or losses(report["output"]) != expected:
            bad.append((what, "harms training", report["status"], report["output"][-1000:]))
        elif len(said) > 3 or report["seconds"] > 40:
            bad.append((what, "is noisy or slow", report["seconds"], [line[:200] for line in said[:8]]))
        elif "" in case.values() and (said or arrived[f"case{number}"] != arrived["case1"]):
            bad.append((what, "empty isn't unset", arrived[f"case{number}"], [line[:200] for line in said]))
    assert not bad, "\n".join(map(str, bad))


ENABLED = ("--otel-enabled", "--otel-span-groups", "default,step", "--otel-service-name=x")
INSTRUMENT = """
import sys
from megatron_autoinstrument import MegatronInstrumentor
with MegatronInstrumentor().paused():
    MegatronInstrumentor().instrument()
MegatronInstrumentor().instrumentation_dependencies()
exec(open(sys.argv.pop(1)).read())
MegatronInstrumentor().uninstrument()
"""


def broken(folder, package):
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("raise ImportError('broken')\n")
    return folder


@pytest.mark.parametrize("way", ["flag", "variable", "instrument()"])
@pytest.mark.parametrize("what", ["OTEL_PROPAGATORS", "opentelemetry", "wrapt", "nothing"])
def test_flags_are_known_and_training_goes_on_whatever_cannot_be_imported(tmp_path, way, what):
    environment = {"OTEL_PROPAGATORS": "tracecontext,nonsense"} if what == "OTEL_PROPAGATORS" else {}
    first = [broken(tmp_path, what)] if what in ("opentelemetry", "wrapt") else []
    if way == "variable":
        environment["MEGATRON_OTEL_ENABLED"] = "1"
    if way == "instrument()":
        script = tmp_path / "script.py"
        script.write_text(INSTRUMENT)
        done, spans = train(SCRIPT, *ENABLED, script=script, first=first, **environment)
    else:
        done, spans = train(*ENABLED, first=first, **environment)
    assert done.returncode == 0, done.stdout
    assert len(losses(done.stdout)) == 3
    said = [line for line in done.stdout.splitlines() if "step" not in line and not line.startswith("loss ")]
    if what in ("opentelemetry", "wrapt"):
        assert not spans
        (line,) = said
        assert "Could not instrument Megatron; nothing is recorded. ImportError: broken" in line
    else:
        assert spans["megatron.train_step"] == 3
        assert len(said) == (what == "OTEL_PROPAGATORS")
        assert all("Propagator nonsense not found" in line for line in said)


def test_megatrons_parser_is_taught_the_flags_once_whatever_teaches_it(tmp_path):
    for first in ([], [broken(tmp_path, "wrapt")]):
        done, _ = train("--help", "--otel-enabled", first=first)
        assert done.stdout.count("--otel-service-name OTEL_SERVICE_NAME") == 2  # usage and explanation


# OTEL_CONFIG_FILE

FILE = """
file_format: "1.0"
resource:
  attributes: [{{name: service.name, value: from-the-file}}]
{sections}
"""
SPANS_TO_CONSOLE = "tracer_provider: {processors: [{simple: {exporter: {console: {}}}}]}"
OTLP = "{otlp_grpc: {endpoint: '${OTEL_EXPORTER_OTLP_ENDPOINT}', tls: {insecure: true}}}"
SPANS_BY_OTLP = f"tracer_provider: {{processors: [{{batch: {{exporter: {OTLP}}}}}]}}"
METRICS_TO_CONSOLE = "meter_provider: {readers: [{periodic: {exporter: {console: {}}}}]}"
OURS = "instrumentation/development: {{python: {{megatron: {{{}}}}}}}"


@pytest.fixture
def config_file(tmp_path):
    pytest.importorskip("opentelemetry.configuration")

    def write(*sections):
        file = tmp_path / "otel.yaml"
        file.write_text(FILE.format(sections="\n".join(sections)))
        return str(file)

    return write


AUTO = (
    sys.executable,
    "-c",
    "from opentelemetry.instrumentation.auto_instrumentation import run; run()",
    sys.executable,
)
WAYS = {"variable": (sys.executable,), "opentelemetry-instrument": AUTO}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sections", [(SPANS_TO_CONSOLE,), (METRICS_TO_CONSOLE,), ()])
def test_the_file_decides_alone_and_what_it_leaves_out_gets_nothing(config_file, way, sections):
    done, spans = train(
        python=WAYS[way],
        OTEL_CONFIG_FILE=config_file(*sections),
        OTEL_TRACES_EXPORTER="otlp",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",  # whatever went there would wait at exit
        OTEL_SERVICE_NAME="from-the-variable",
        **{**ON, "MEGATRON_OTEL_METRICS_ENABLED": "1", "MEGATRON_OTEL_EXPORTER": "otlp"},
    )
    assert done.returncode == 0, done.stdout
    assert not spans
    assert not messages(done.stdout)
    written = set(re.findall(r'"name": "(megatron\.[^"]+)"', done.stdout))
    assert written & SPANS == (SPANS if SPANS_TO_CONSOLE in sections else set())
    assert ('"name": "of.the.user"' in done.stdout) == (METRICS_TO_CONSOLE in sections)
    assert "were dropped" not in done.stdout
    if SPANS_TO_CONSOLE in sections:
        assert '"service.name": "from-the-file"' in done.stdout
        assert '"dl.rank": 0' in done.stdout
        assert "from-the-variable" not in done.stdout


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ours", "environment", "options", "recorded"),
    [
        ("span_groups: 'job,step'", {}, (), {"megatron.pretrain", "megatron.train", "megatron.train_step"}),
        ("span_groups: [step]", {"MEGATRON_OTEL_SPAN_GROUPS": "job"}, (), {"megatron.train_step"}),
        ("span_groups: step", {}, ("--otel-span-groups", "model_init"), {"megatron.model_init"}),
        ("rank_strategy: all_ranks", {"MEGATRON_OTEL_SPAN_GROUPS": "step"}, (), {"megatron.train_step"}),
        ("enabled: false", {}, (), set()),
        ("span_groups: step", {"MEGATRON_OTEL_ENABLED": "0"}, (), set()),
        ("span_groups: step, no_such_setting: 1", {}, (), {"megatron.train_step"}),
        (
            "span_groups: no_such_group",
            {"MEGATRON_OTEL_TRACES_ENABLED": ""},
            (),
            {"megatron.pretrain", "megatron.train"},
        ),
    ],
)
def test_settings_in_the_file_beat_variables_and_flags_beat_them(
    config_file, way, ours, environment, options, recorded
):
    file = config_file(SPANS_BY_OTLP, OURS.format(ours))
    done, spans = train(
        *options, python=WAYS[way], **{"OTEL_CONFIG_FILE": file, "MEGATRON_OTEL_ENABLED": "1", **environment}
    )
    assert done.returncode == 0, done.stdout
    assert set(spans) == recorded
    said = messages(done.stdout)
    if "no_such" in ours:
        (line,) = said
        assert re.search(
            r"((no_such_setting|span_groups) in OTEL_CONFIG_FILE|instrument\(span_groups).* is ignored.*Allowed: ", line
        )
    else:
        assert not said


# A folder on PYTHONPATH, as of `pip install --target`: Python runs no .pth line in it.


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python whose own site-packages are empty, and a folder with what is installed here."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python"), SITE.parent


@pytest.mark.parametrize("way", ["opentelemetry-instrument", "its folder", "instrument()", "variable"])
def test_in_a_folder_on_the_path_these_ways_work_and_the_variable_alone_does_nothing(bare_python, tmp_path, way):
    python, site = bare_python
    auto = SITE / "instrumentation" / "auto_instrumentation"
    prefix = (*AUTO[1:3], python) if way == "opentelemetry-instrument" else ()
    script = tmp_path / "train.py"
    script.write_text(
        ("from megatron_autoinstrument import MegatronInstrumentor\n" if way == "instrument()" else "")
        + ("MegatronInstrumentor().instrument()\n" if way == "instrument()" else "")
        + "from megatron.training import arguments, global_vars, training\n"
        "global_vars.set_args(arguments.parse_args())\ntraining.pretrain()\n"
    )
    done, spans = train(
        script=script,
        python=(python, *prefix),
        PYTHONPATH=os.pathsep.join(
            [path(*([auto] if way == "its folder" else [])), str(site)]
        ),  # Megatron's real one last
        OTEL_METRICS_EXPORTER="none",
        OTEL_LOGS_EXPORTER="none",
        **({"MEGATRON_OTEL_ENABLED": "1"} if way == "variable" else {}),
        MEGATRON_OTEL_SPAN_GROUPS="all",
    )
    assert done.returncode == 0, done.stdout
    assert len(losses(done.stdout)) == 3
    assert {name for name in spans if name.startswith("megatron.")} == (set() if way == "variable" else SPANS)
