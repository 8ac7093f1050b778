"""docs/cost.md is true: its formulas and sizes are those of real runs, its sums and its example follow from them."""

import re
import zlib
from collections import Counter
from functools import cache
from itertools import product

import pytest
from harness import INSTRUMENT, ROOT, train
from test_flags_and_logs import logged
from test_metrics import run_of as run_with_metrics
from test_spans_of_a_run import ASYNC, OVERLAP, SCENARIOS, run_of

from megatron_autoinstrument.common.groups import GROUPS, PRESETS
from megatron_autoinstrument.common.semconv import SPAN_GROUPS

DOC = (ROOT / "docs" / "cost.md").read_text()
STEP, EVALUATION_STEP = "training step", "evaluation step"
MEASURED = r"^\| {}[^|]* \| ([\d.]+) \| ([\d.]+) \|"
# Of each price, the beginning of the row of what was measured per call, and of how many spans that is.
MEASURED_ROWS = {
    "step": ("a step", 1),
    "coarse": ("a coarse call", 1),
    "communication": ("a P2P call", 2),
    "microbatch": ("a microbatch", 1),
    "frequent": ("a layer", 1),
    "silent": ("the schedule", 1),
    "metrics": ("the metrics", 1),
}


def table(head):
    """The rows of the table whose header begins with `head`, as their cells, without backticks."""
    lines = DOC.split(f"\n| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.replace("`", "").strip("|").split("|")] for line in lines]


def number(text):
    return float(re.match(r"[\d,.]+", text)[0].replace(",", ""))


SPANS = table("Span")
BYTES = {name: number(size) for name, *_, size in SPANS}
BESIDE = [what for _, what in table("Beside the spans")]
PER_BATCH, GZIP, PER_METRICS, PER_LOG = map(number, BESIDE[:-1])
BATCHES = BESIDE[-1]
MICROSECONDS = {name: (float(thread), float(all_of_them)) for name, thread, all_of_them, _ in table("µs per span")}
KINDS = {group: name for name, *_, groups in table("µs per span") for group in groups.split(", ") if group}


def value(formula, letters):
    return eval(formula, {"min": min}, letters)


def letters(p, s, **others):
    return {"r": 0, "k": 0, "o": 0, **others, "p": p, "s": s, "first": int(s == 0), "last": int(s == p - 1)}


def spans(each, at, groups=frozenset(GROUPS)):
    """How many spans of each name the document promises, of those that there are per `each`."""
    return +Counter(
        {
            name: value(formula, at)
            for name, group, of, formula, _ in SPANS
            if each in of.split(", ") and group in groups
        }
    )


# ------------------------------------------------------------------------------------------ the document in itself


def test_every_span_has_a_row_and_every_group_a_price():
    assert {name: group for name, group, *_ in SPANS} == SPAN_GROUPS
    assert set(KINDS) == set(SPAN_GROUPS.values())


def test_the_sums_are_those_of_the_spans():
    places = {
        "No pipeline": lambda p, s, v: p == v == 1,
        "First stage": lambda p, s, v: s == 0 and p > 1 and v == 1,
        "A stage between": lambda p, s, v: 0 < s < p - 1 and v == 1,
        "Last stage": lambda p, s, v: s == p - 1 > 0 and v == 1,
        "Interleaved": lambda p, s, v: p > 1 and v > 1,
    }
    for names, *formulas in table("Groups | No pipeline"):
        preset = PRESETS.get(names.removeprefix("preset "))
        groups = preset or set(names.split(", "))
        assert groups <= set(GROUPS)
        for formula, here in zip(formulas, places.values(), strict=True):
            for m, p, v, l, d in product((1, 3, 8), (1, 2, 3, 5), (1, 2, 3), (1, 6), (0, 1, 2)):  # noqa: E741
                for s in range(p):
                    if here(p, s, v):
                        at = letters(p, s, m=m, v=v, l=l, d=d, g=v)
                        assert value(formula, at) == spans(STEP, at, groups).total(), (names, formula, at)


def test_the_microseconds_are_those_measured_per_call():
    assert MEASURED_ROWS.keys() == MICROSECONDS.keys()
    for kind, (row, spans_in_it) in MEASURED_ROWS.items():
        found = re.search(MEASURED.format(row), DOC, re.MULTILINE)
        assert [pytest.approx(float(figure) / spans_in_it, rel=0.05) for figure in found.groups()] == list(
            MICROSECONDS[kind]
        )


# The example: the letters that are the same on all its ranks, and its sizes.
ALIKE = {name: int(here) for name, _, here in table("Letter") if here.isdigit()}
TENSOR, PIPELINE, DATA, SECONDS = map(
    int, re.search(r"size (\d+), pipeline (\d+), data (\d+);.* (\d+) s per step", DOC).groups()
)
PLACES = [
    letters(s=s, d=int(tensor == 0 and s in (0, PIPELINE - 1)), **ALIKE)
    for s in range(PIPELINE)
    for tensor in range(TENSOR)
]  # each on as many ranks as the data-parallel size
STRATEGIES = {
    "the last": PLACES[-1:],
    "the first of each node": PLACES[::TENSOR],
    "all": PLACES,
}


def example(preset, strategy, one_of=1):
    """The row of these settings.

    Args:
        preset: Of groups.
        strategy: Which ranks record.
        one_of: Of so many steps the sampler keeps one.
    """
    there = STRATEGIES[strategy]
    ranks = 1 if strategy == "the last" else len(there) * DATA
    means = Counter()  # of a step of one rank
    for at in there:
        for name, of_one in spans(STEP, at, PRESETS[preset]).items():
            means[name] += of_one / len(there)
    total = means.total()
    batches = value(BATCHES, {"n": total, "t": SECONDS}) if total else 0
    size = (sum(BYTES[name] * often for name, often in means.items()) + batches * PER_BATCH) / one_of
    size += PER_METRICS * SECONDS / 60
    calls = Counter(silent=len({"forward_backward", "step"} - PRESETS[preset]), metrics=1)
    for name, often in means.items():
        calls[KINDS[SPAN_GROUPS[name]]] += often
    times = [sum(MICROSECONDS[kind][at] * often for kind, often in calls.items()) for at in (0, 1)]
    cells = [
        f"`{preset}`" if one_of == 1 else f"`{preset}`, one step of {one_of}",
        strategy if ranks == 1 else f"{strategy}: {ranks:,}",
        short(total / one_of),
        *(
            f"{short(time, ' µs', ' ms')} ({short(time / 1e4 / SECONDS)} %)"
            if one_of == 1
            else "of a kept one as above"
            for time in times
        ),
        short(size, " B", " kB"),
        short(size * ranks / SECONDS, " B/s", " kB/s", " MB/s"),
        short(total * ranks / SECONDS / one_of),
        short(size * ranks / SECONDS * 86_400 / 1e6, " MB", " GB", " TB"),
    ]
    return f"| {' | '.join(cells)} |"


def short(figure, *units):
    """Two significant digits, in the first of the units that leaves less than 1,000; each is 1,000 of the last."""
    unit, *larger = units or ("",)
    while larger and float(f"{figure:.2g}") >= 1000:
        figure /= 1000
        unit, *larger = larger
    rounded = float(f"{figure:.2g}")
    return (f"{rounded:,.0f}" if rounded >= 10 or not rounded else f"{rounded:.6f}".rstrip("0").rstrip(".")) + unit


def test_the_example_follows_from_the_rest():
    rows = [
        *(example("default", strategy) for strategy in ("the last", "all")),
        *(example(preset, strategy) for preset in ("per_step", "all") for strategy in STRATEGIES),
        *(example(preset, "all", 100) for preset in ("per_step", "all")),
    ]
    shown = DOC.split("\n| Groups | Ranks that record |")[1].split("\n\n")[0].splitlines()[2:]
    assert shown == rows, "\n".join(["The rest of the document gives:", *rows])


# ------------------------------------------------------------------------------------------ real runs


def inside(span):
    yield span
    for child in span.children:
        yield from inside(child)


def places(run, scenario):
    """Each rank with its letters."""
    buckets = sum(
        map(int, re.findall(r"Number of buckets for gradient all-reduce / reduce-scatter: (\d+)", run.output))
    )
    k = 0
    if scenario.load:
        k = 2 if SCENARIOS[scenario.load].save == "torch_dist" else 1
    for rank in run.ranks:
        stage = rank // scenario.data_parallel
        yield (
            rank,
            letters(
                scenario.stages,
                stage,
                m=scenario.microbatches,
                v=scenario.chunks,
                l=scenario.chunks * scenario.layers,
                d=scenario.chunks,  # the tiny GPT's script has every chunk read
                # Those of the other stages are not split.
                g=buckets - scenario.stages + 1 if scenario.options == OVERLAP and stage == 0 else scenario.chunks,
                r=int(scenario.recompute),
                k=k,
            ),
        )


def counted(run, rank, name):
    """What is in each span of that name, itself included."""
    return [Counter(found.name for found in inside(span)) for span in run.of(rank) if span.name == name]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_has_the_spans_of_the_formulas(name):
    scenario, run = SCENARIOS[name], run_of(name)
    for rank, at in places(run, scenario):
        steps = counted(run, rank, "megatron.train_step")
        evaluations = counted(run, rank, "megatron.evaluate.step")
        assert steps == [spans(STEP, at)] * scenario.steps
        assert evaluations == [spans(EVALUATION_STEP, at | {"r": 0})] * 2 * scenario.evaluations
        rest = run.counts(rank) - sum(steps + evaluations, Counter())
        save = "asynchronous save" if scenario.more == ASYNC else "save"
        times = {
            "run": 1,
            "evaluation": scenario.evaluations,
            "load": bool(scenario.load),
            save: 2 * bool(scenario.save),
        }
        assert rest == sum(
            (Counter(list(spans(each, at).elements()) * often) for each, often in times.items()), Counter()
        )


@cache
def interleaved_on_four_stages():
    run = train(
        *("--pipeline-model-parallel-size", "4", "--num-layers", "8", "--num-layers-per-virtual-pipeline-stage", "1"),
        *("--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1"),
        ranks=4,
    )
    assert run.status == 0, run.output[-3000:]
    return run


def test_stages_between_have_the_spans_of_the_formulas_with_interleaving():
    run = interleaved_on_four_stages()
    for rank in run.ranks:
        at = letters(4, rank, m=4, v=2, l=2, d=2, g=2)
        assert counted(run, rank, "megatron.train_step") == [spans(STEP, at)] * 2
        evaluations = counted(run, rank, "megatron.evaluate.step")
        assert evaluations == [spans(EVALUATION_STEP, at)] * len(evaluations) != []


def of_signal(run, signal, rank=None):
    """The export requests of a rank, with what each of them is of."""
    kind = {"spans": "resource_spans", "metrics": "resource_metrics", "logs": "resource_logs"}[signal]
    for request in run.requests[signal]:
        (resource,) = getattr(request, kind)
        ranks = [pair.value.int_value for pair in resource.resource.attributes if pair.key == "dl.rank"]
        if rank is None or ranks == [rank]:
            yield request, resource


def sizes(scopes, what):
    """Of each span or log record in these scopes, as it lies in its batch: behind a tag and its length."""
    for scope in scopes:
        for found in getattr(scope, what):
            yield found, found.ByteSize() + (3 if found.ByteSize() > 127 else 2)


def test_a_span_is_as_large_as_its_row_says():
    largest = Counter()
    for name in ("four stages", "pipeline, loading", "saving asynchronously", "one rank, saving"):
        for _, resource in of_signal(run_of(name), "spans"):
            for span, size in sizes(resource.scope_spans, "spans"):
                largest[span.name] = max(largest[span.name], size)
    assert set(SPAN_GROUPS) - set(largest) == {"megatron.activation.offload", "megatron.activation.reload"}
    assert largest == {name: pytest.approx(BYTES[name], rel=0.1) for name in largest}


@pytest.mark.parametrize("name", ["four stages", "one rank, saving"])
def test_a_run_sends_the_bytes_of_the_formulas(name):
    scenario, run = SCENARIOS[name], run_of(name)
    for rank, at in places(run, scenario):
        requests = [request for request, _ in of_signal(run, "spans", rank)]
        times = {STEP: scenario.steps, EVALUATION_STEP: 2 * scenario.evaluations, "evaluation": scenario.evaluations}
        times |= {"run": 1, "save": 2 * bool(scenario.save)}
        promised = sum(
            BYTES[span] * of_one * often for each, often in times.items() for span, of_one in spans(each, at).items()
        )
        sent = sum(request.ByteSize() for request in requests)
        assert sent == pytest.approx(promised + PER_BATCH * len(requests), rel=0.15)
        (whole,) = (span for span in run.of(rank) if span.name == "megatron.pretrain")
        # And three: one at the end, and the clock's first and last.
        assert len(requests) <= value(BATCHES, {"n": len(run.of(rank)), "t": whole.duration_ms / 1e3}) + 3


def test_a_batch_weighs_and_is_compressed_as_the_document_says():
    ratios = {}  # by the number of spans
    for name in ("four stages", "interleaved"):
        for request, resource in of_signal(run_of(name), "spans"):
            own = [size for _, size in sizes(resource.scope_spans, "spans")]
            assert len(own) <= 512
            assert request.ByteSize() - sum(own) == pytest.approx(PER_BATCH, rel=0.15)
            ratios[len(own)] = len(zlib.compress(request.SerializeToString())) / request.ByteSize()
    assert 100 * ratios[max(ratios)] == pytest.approx(GZIP, rel=0.15)


def test_metrics_and_logs_weigh_what_the_document_says():
    for rank in (0, 1):
        *_, (last, _) = of_signal(run_with_metrics(INSTRUMENT, "--log-throughput"), "metrics", rank)
        assert last.ByteSize() == pytest.approx(PER_METRICS, rel=0.15)
    beside = [
        size - len(record.body.string_value)
        for _, resource in of_signal(logged(INSTRUMENT), "logs")
        for record, size in sizes(resource.scope_logs, "log_records")
    ]
    assert sum(beside) / len(beside) == pytest.approx(PER_LOG, rel=0.15)
