"""What may leave of an exception, and that secrets don't: not on spans, not in log records, not in this package's own
log, not in the resource."""

import builtins
import logging
import sys
import types

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

from megatron_autoinstrument.common import redact
from megatron_autoinstrument.common.redact import redacted
from megatron_autoinstrument.export import providers, resource
from megatron_autoinstrument.process import ranks
from megatron_autoinstrument.recording import recorder as recording
from megatron_autoinstrument.recording.record import FREQUENT, LIVE
from megatron_autoinstrument.targets import logging as logging_target

try:
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter
except ImportError:
    from opentelemetry.sdk._logs.export import InMemoryLogExporter as InMemoryLogRecordExporter

Group = getattr(builtins, "ExceptionGroup", None)  # from Python 3.11 on
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJib2IifQ.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEF"
PEM = f"-----BEGIN {{}}PRIVATE KEY-----\n{KEY}\nAASCBKcwggSjAgEAAoIBAQC7\n-----END {{}}PRIVATE KEY-----"
AWS = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
AZURE = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

# What a text, a variable or a word of a command line may look like, and the secret in it.
FORMS = [
    # URLs with credentials.
    *(
        (f"{scheme}://bob:s3cretpw@host{rest}", "s3cretpw")
        for scheme in ("http", "https", "socks5", "ftp", "redis", "rediss", "amqp", "mongodb", "mongodb+srv", "nats")
        for rest in ("", ":3128", "/path?x=1")
    ),
    *((f"{scheme}://bob:s3cretpw@host/db", "s3cretpw") for scheme in ("postgresql", "postgresql+psycopg2", "mysql")),
    ("http://bob:s3cr%40t%2Fpw@proxy:3128", "s3cr%40t%2Fpw"),
    ("http://bob:p@ss-w0rd@proxy:3128", "p@ss-w0rd"),
    ("http://bob:p@ss/w0rd@proxy:3128/x", "w0rd"),
    ("http://:s3cretpw@proxy", "s3cretpw"),
    ("https://s3cretpw@sentry.io/1", "s3cretpw"),
    ("git+https://oauth2:s3cretpw@gitlab.com/a/b.git", "s3cretpw"),
    ("jdbc:postgresql://host/db?user=bob&password=s3cretpw", "s3cretpw"),
    ("https://host/x?api_key=s3cretpw&y=1", "s3cretpw"),
    ("https://host/x?sig=s3cretpw", "s3cretpw"),
    ("https://host/x?X-Amz-Signature=s3cretpw&z", "s3cretpw"),
    # Beside its name, as in an argument list, a header, a call or a document.
    ("Command '['mysql', '--password', 's3cretpw', '-h', 'db']' returned non-zero exit status 1.", "s3cretpw"),
    ("[('x-api-key', 's3cretpw'), ('accept', '*/*')]", "s3cretpw"),
    ("_Metadatum(key='x-api-key', value='s3cretpw')", "s3cretpw"),
    ("{b'x-api-key': b's3cretpw'}", "s3cretpw"),
    ("- name: DB_PASSWORD\n  value: s3cretpw", "s3cretpw"),
    ('{"name": "api-key", "value": "s3cretpw"}', "s3cretpw"),
    ("<password>s3cretpw</password>", "s3cretpw"),
    ("Authorization: ApiKey s3cretpw", "s3cretpw"),
    ("'Authorization': 'Api-Token s3cretpw'", "s3cretpw"),
    ("Cookie: sid=abc; csrf=s3cretpw", "s3cretpw"),
    ("Config(password=Secret('s3cretpw'))", "s3cretpw"),
    ("passwords=['s3cretpw']", "s3cretpw"),
    ("curl -u bob:s3cretpw https://host", "s3cretpw"),
    ("['curl', '-u', 'bob:s3cretpw']", "s3cretpw"),
    ("hvs.CAESIJ9abcdefghijklmnopqrstuvwxyz", "CAESIJ9abcdefghijklmnopqrstuvwxyz"),
    ("dt0c01.ST2EY72KQINMH574.G3DFPBEJYMODIDAE", "G3DFPBEJYMODIDAE"),
    ("https://hooks.slack.com/services/T000/B000/XXs3cretpwXX", "s3cretpw"),
    # Keys of services, by themselves.
    (JWT, JWT),
    (f"AKIA{'IOSFODNN7EXAMPLE'}", "IOSFODNN7EXAMPLE"),
    (f"ASIA{'IOSFODNN7EXAMPLE'}", "IOSFODNN7EXAMPLE"),
    (AWS, AWS),
    (AZURE, AZURE),
    *(
        (prefix + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8", "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8")
        for prefix in (
            *("ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "hf_", "sk-", "sk-proj-", "sk_live_", "rk_live_"),
            *("AIza", "ya29.", "xoxb-", "xoxp-", "npm_", "pypi-", "nvapi-", "SG.", ""),
        )
    ),
    ("0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),  # Weights & Biases
    ("YWxhZGRpbjpvcGVuc2VzYW1l/YWJj+ZGVmZ2hpamtsbW5v1==", "YWxhZGRpbjpvcGVuc2VzYW1l"),
    # Private keys.
    *((PEM.format(kind, kind), KEY) for kind in ("", "RSA ", "EC ", "OPENSSH ")),
    (PEM.format("", "").replace("\n", "\\n"), KEY),
    (PEM.format("", "").partition("-----END")[0], KEY),
    # Names and values.
    *(
        (f"{name}=s3cretpw", "s3cretpw")
        for name in (
            *(
                "DB_PASS",
                "PGPASSWORD",
                "MYSQL_PWD",
                "REDIS_PW",
                "SENTRY_DSN",
                "GCP_CREDS",
                "API_KEY",
                "ApiKey",
                "apikey",
            ),
            *("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "NGC_API_KEY", "client_secret"),
            *("SSH_PASSPHRASE", "AUTHORIZATION", "HTTP_COOKIE", "SESSION", "dbPassword", "AZURE_SAS", "PRIVATE_KEY_ID"),
            *(
                "SLACK_WEBHOOK",
                "JWT",
                "PASSWORD_SALT",
                "OTEL_EXPORTER_OTLP_HEADERS",
                "X-Api-Key",
                "signing-key",
                "user.pin",
            ),
        )
    ),
    ("Server=db;Database=x;User Id=bob;Password=s3cretpw;", "s3cretpw"),
    ("host=db port=5432 user=bob password=s3cretpw sslmode=require", "s3cretpw"),
    ("host=db password='s3cret pw' user=bob", "s3cret pw"),
    (f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={AZURE};EndpointSuffix=x", AZURE),
    ("Endpoint=sb://x/;SharedAccessKeyName=Root;SharedAccessKey=s3cretpw", "s3cretpw"),
    # Command lines.
    ("curl --api-key s3cretpw https://host", "s3cretpw"),
    ("--wandb-api-key=s3cretpw", "s3cretpw"),
    ("mysql --password s3cretpw -h db", "s3cretpw"),
    ("tool --auth-token 's3cret pw' run", "s3cret pw"),
    ("trainer.logger.api_key=s3cretpw", "s3cretpw"),
    # JSON, Python, YAML, headers.
    ('{"password": "s3cretpw", "user": "bob"}', "s3cretpw"),
    ('{"a": {"private_key":"s3cretpw"}}', "s3cretpw"),
    ('{"token": "s3cr\\"etpw"}', "etpw"),
    ("{'password': 's3cretpw'}", "s3cretpw"),
    ("Config(user='bob', secret='s3cretpw')", "s3cretpw"),
    ("password: s3cretpw", "s3cretpw"),
    ("password => s3cretpw", "s3cretpw"),
    ("Authorization: Bearer s3cretpw", "s3cretpw"),
    ("Authorization: Basic Ym9iOnMzY3JldHB3", "Ym9iOnMzY3JldHB3"),
    ("authorization: Token s3cretpw", "s3cretpw"),
    ("sent with bearer s3cretpw", "s3cretpw"),
    ("Cookie: session=s3cretpw; theme=dark", "s3cretpw"),
    ("x-api-key: s3cretpw", "s3cretpw"),
    ("authorization=Bearer%20s3cretpw,tenant=blue", "s3cretpw"),
    ("first line\npassword=s3cretpw\nlast line", "s3cretpw"),
    ("password =\n  s3cretpw", "s3cretpw"),
    ('PASSWORD="s3cret\npw"', "s3cret"),
]
forms = pytest.mark.parametrize(("text", "secret"), FORMS, ids=map(str, range(len(FORMS))))


def test_there_are_more_than_a_hundred_forms_of_secrets():
    assert len({text for text, _ in FORMS}) > 100


def raise_all(text):
    """Text in every place that an exception has for it."""
    local = text  # noqa: F841

    class OfText(Exception):
        def __str__(self):
            return text

    try:
        try:
            try:
                raise FileNotFoundError(2, text, text)
            except OSError as error:
                raise KeyError(text) from error
        except KeyError:
            raise type(f"Error {text}", (OfText,), {"__module__": text})(text)  # noqa: B904
    except Exception as error:
        if Group:
            error.add_note(text)
            raise Group(text, [error, SyntaxError(text, (text, 1, 1, text))]) from error
        raise


def everything_of(exporter):
    return "\n".join(
        str(
            [
                span.name,
                dict(span.attributes),
                span.status.description,
                *((e.name, dict(e.attributes)) for e in span.events),
            ]
        )
        for span in exporter.get_finished_spans()
    )


@forms
def test_no_secret_leaves_on_a_span(recorder, exporter, text, secret):
    for kind in (LIVE, FREQUENT):
        record = recorder.begin("megatron.train_step", kind)
        with pytest.raises(Exception) as raised:  # noqa: PT011
            raise_all(text)
        recorder.end(record, raised.value)
    recorder.flush()
    assert len(exporter.get_finished_spans()) == 2
    assert exporter.get_finished_spans()[0].events
    assert secret not in everything_of(exporter)
    assert repr(secret)[1:-1] not in everything_of(exporter)


@forms
def test_no_secret_is_in_a_line_of_this_packages_log(caplog, text, secret):
    logger = redact.get_logger("megatron_autoinstrument.test")
    try:
        raise_all(text)
    except Exception as error:
        logger.warning("%s=%r is ignored.", "MEGATRON_OTEL_EXPORTER", text)
        logger.warning("Exporting failed: %s: %s", type(error).__name__, OSError(text))
        logger.warning("Recording failed", exc_info=True)
        logger.warning(text)
    assert len(caplog.records) == 4
    assert "Recording failed\nTraceback" in caplog.text
    assert secret not in caplog.text
    assert not [record for record in caplog.records if secret in str(vars(record))]


# Where the process got it from.
def in_a_variable_that_says_so(monkeypatch, text, secret):
    monkeypatch.setenv("SERVICE_PASSWORD", secret)


def in_any_variable(monkeypatch, text, secret):
    monkeypatch.setenv("SETTING", text)


def as_an_argument(monkeypatch, text, secret):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--setting", text])


def as_a_secret_argument(monkeypatch, text, secret):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--password", secret])


GIVEN = [in_a_variable_that_says_so, in_any_variable, as_an_argument, as_a_secret_argument]


@pytest.mark.parametrize("given", GIVEN)
def test_with_its_text_no_secret_leaves_that_the_process_was_given(monkeypatch, given):
    monkeypatch.setattr(redact, "with_text", True)
    for text, secret in FORMS:
        with monkeypatch.context() as here:
            given(here, text, secret)
            alone = (secret, f"it is {secret}, and wrong", repr(secret)) if given in GIVEN[::3] else ()
            for shown in (*alone, text, f"refused: {text!r}"):
                error = RuntimeError(f"could not connect: {shown}")
                told = str(redact.described(error))
                assert "could not connect" in told
                assert secret not in told, (text, shown, told)


def test_no_secret_is_in_the_resource(monkeypatch):
    for number, (text, secret) in enumerate(FORMS):
        monkeypatch.setenv(f"SETTING_{number}", text)
        monkeypatch.setenv(f"PASSWORD_{number}", secret)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *(text for text, _ in FORMS)])
    attributes = providers._described(
        providers.Resource.create(),
        providers.ProviderOptions(None, resource.attributes(ranks.current(), "run"), None, None),
    ).attributes
    assert attributes["service.name"] == "megatron-lm"
    assert not [secret for _, secret in FORMS if secret in str(dict(attributes))]


@pytest.mark.parametrize("with_text", [False, True])
def test_an_exported_log_record_says_of_an_exception_what_a_span_says(monkeypatch, with_text):
    exporter, provider = InMemoryLogRecordExporter(), LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    handler = providers._log_handler(provider)
    monkeypatch.setattr(redact, "with_text", with_text)
    hook = logging_target.SEAMS[0].hook(logging.Logger.callHandlers, types.SimpleNamespace(log_handler=handler))
    try:
        raise ValueError("s3cretpw")
    except ValueError:
        record = logging.getLogger("theirs").makeRecord(
            "theirs", logging.ERROR, "/home/bob/train.py", 1, "it failed", (), sys.exc_info()
        )
    record.exc_text = "as some handler has formatted it: s3cretpw"
    before = dict(vars(record))
    hook.begin((logging.getLogger("theirs"), record), {})
    assert vars(record) == before  # other handlers get it as it was
    (log,) = exporter.get_finished_logs()
    attributes = log.log_record.attributes
    assert attributes["exception.type"] == "ValueError"
    assert 'File "test_redact", line' in attributes["exception.stacktrace"] or with_text
    assert ("s3cretpw" in str(dict(attributes))) == with_text
    assert log.log_record.body == "it failed"


# ---------------------------------------------------------------------------------------------------- what is told


def failing():
    raise ValueError("no")


def of(call):
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError


def test_a_stack_has_modules_functions_and_lines_and_no_files_source_or_text():
    def chained():
        try:
            failing()
        except ValueError as error:
            raise OSError("/home/bob/secret/train.bin") from error

    line = failing.__code__.co_firstlineno + 1
    function = "test_a_stack_has_modules_functions_and_lines_and_no_files_source_or_text.<locals>."
    prefix = function if sys.version_info >= (3, 11) else ""
    stack = redact.stack(of(chained))
    assert [text.strip() for text in stack.splitlines() if "line" not in text] == [
        "Traceback (most recent call last):",
        "ValueError",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        "OSError",
    ]
    assert f'  File "{__name__}", line {line}, in failing\nValueError\n' in stack
    assert f", in {prefix}chained\n" in stack
    assert "train" not in stack


@pytest.mark.skipif(Group is None, reason="Python 3.11 has groups")
def test_a_group_names_the_types_in_it_and_is_bounded():
    inner = Group("s3cretpw", [KeyError("s3cretpw")] * 1000)
    stack = redact.stack(of(lambda: (_ for _ in ()).throw(Group("s3cretpw", [TypeError("s3cretpw"), inner]))))
    assert "ExceptionGroup\n  + TypeError\n  + ExceptionGroup\n  + KeyError" in stack
    assert len(stack.splitlines()) < 40


def test_deep_stacks_and_long_chains_are_bounded(monkeypatch):
    def down(depth):
        return down(depth - 1) if depth else failing()

    def chain():
        error = ValueError()
        for _ in range(1000):
            after = ValueError("x" * 1000)
            after.__cause__ = error
            error = after
        raise error

    monkeypatch.setattr(sys, "setrecursionlimit", sys.setrecursionlimit)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        deep = of(lambda: down(10_000))
    finally:
        sys.setrecursionlimit(limit)
    assert "more]" in redact.stack(deep)
    assert redact.stack(deep).endswith("in failing\nValueError")
    for with_text in (False, True):
        monkeypatch.setattr(redact, "with_text", with_text)
        for error in (deep, of(chain), of(lambda: down(10_000))):
            told = redact.described(error)
            assert all(len(value) <= 32_768 for value in told.values())
            assert "exception.stacktrace" in told


def test_a_secret_at_the_place_where_a_text_is_cut_is_none(monkeypatch):
    monkeypatch.setattr(redact, "with_text", True)
    monkeypatch.setenv("PASSWORD", "s3cretpw" * 10)
    for length in range(32_600, 41_000, 400):
        told = redact.described(ValueError("x" * length + "s3cretpw" * 10 + "y" * 100_000))
        assert "s3cret" not in told["exception.message"]
        assert "tpws3" not in told["exception.stacktrace"]


class Evil(type):
    def __getattribute__(cls, name):
        raise RuntimeError(name)


class Hostile(Exception, metaclass=Evil):
    def __getattribute__(self, name):
        raise RuntimeError(name)

    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


@pytest.mark.parametrize("with_text", [False, True])
def test_an_exception_whose_class_and_attributes_raise_is_recorded(monkeypatch, recorder, exporter, with_text):
    monkeypatch.setattr(redact, "with_text", with_text)
    record = recorder.begin("megatron.train_step", LIVE)
    recorder.end(record, of(lambda: (_ for _ in ()).throw(Hostile())))
    recorder.flush()
    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"].endswith("Hostile") or span.attributes["error.type"] == "<unnamed>"
    assert span.events


def test_an_exception_that_cannot_be_described_costs_its_stack_alone(monkeypatch, recorder, exporter):
    def raises(error):
        raise RecursionError

    monkeypatch.setattr(redact, "described", raises)
    recorder.end(recorder.begin("megatron.train_step", LIVE), KeyError())
    recorder.flush()
    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"] == "KeyError"
    assert recorder.current is None


@pytest.fixture
def _given(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer s3cr3t,tenant=blue")
    monkeypatch.setenv("WANDB_API_KEY", "abcdef")
    monkeypatch.setenv("MASTER_NAME", "node-17.cluster")
    monkeypatch.setenv("WORD", "training")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MAX_TOKENS", "4096")
    monkeypatch.setattr(
        sys, "argv", ["pretrain.py", "--data-path=/data/our corpus", "--name", "customer-42", "training"]
    )


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no such file: /data/our/corpus.bin", "no such file: <path>"),
        ("no such file: '~/corpus.bin'", "no such file: '<path>'"),
        ('File "/opt/venv/lib/megatron/training/training.py", line 3', 'File "megatron/training/training.py", line 3'),
        ("sent s3cr3t", "sent <OTEL_EXPORTER_OTLP_HEADERS>"),
        ("key abcdef was refused", "key <WANDB_API_KEY> was refused"),
        ("cannot reach node-17.cluster:29500", "cannot reach <MASTER_NAME>:29500"),
        ("customer-42 has no weights", "<argument> has no weights"),
        # What errors are made of stays.
        ("expected 4096 but got false", "expected 4096 but got false"),
        ("CUDA out of memory. Tried to allocate 2.5 GiB", "CUDA out of memory. Tried to allocate 2.5 GiB"),
        ("in training_log: shape [2, 64] and/or dtype", "in training_log: shape [2, 64] and/or dtype"),
    ],
)
def test_only_what_was_given_in_confidence_is_taken_out(text, expected):
    assert redacted(text) == expected


def test_each_logger_of_this_package_takes_secrets_out():
    loggers = [
        module._logger
        for name, module in sys.modules.items()
        if name.startswith("megatron_autoinstrument") and hasattr(module, "_logger")
    ]
    assert recording._logger in loggers
    assert all(redact._redacting in logger.filters for logger in loggers)
