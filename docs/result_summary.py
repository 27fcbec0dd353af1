"""The table of docs/results/index.md: questions, our number, a reference, a verdict; computed from the result files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import table_transfer
from result_files import TRANSFER, best_fewshot_rows, content, group_of, less, pairs_of, runs_of, score, shots, source

from metapretrain.evaluation.intervals import Interval
from metapretrain.report.markdown import markdown_table, shown

Line = tuple[str, str, str, str, str]  # topic, question, ours, reference, verdict
MISSING = "not run yet"


def compared(gap: Interval, lower_is_better: bool = False, corrected: float = 0.0) -> str:
    """What a paired difference shows; `corrected` is its p-value after Holm's correction for all pairs of its table.

    Example:
        >>> from metapretrain.evaluation.intervals import mean_interval
        >>> compared(mean_interval([1.0, 1.1, 1.2])), compared(mean_interval([-1.0, 1.0]))
        ('better', 'no difference shown')
        >>> compared(mean_interval([1.0, 1.1, 1.2]), corrected=0.2)
        'better, but not after Holm'
    """
    if gap.known and gap.low <= 0 <= gap.high:
        return "no difference shown"
    return ("better" if (gap.mean < 0) is lower_is_better else "worse") + ", but not after Holm" * (corrected >= 0.05)


def verdict_of(name: str, first: str, second: str) -> str:
    """What the difference of two methods shows among all pairs of their table."""
    pairs = pairs_of(name, group_of(name))
    corrected = next(pair[4] for pair in pairs if {first, second} == set(pair[:2]))
    return compared(less(name, first, second), corrected=corrected)


def aimed(value: float, aim: float, digits: int) -> str:
    """Whether a number reaches an aim, and by how much it does not."""
    return "met" if value >= aim else f"missed by {aim - value:.{digits}f}"


def _stl10() -> Iterator[Line]:
    topic = "[STL-10](stl10.md)"
    claim = group_of("stl10-paper").claims[0]
    gain = shown(claim.over_seeds, sign="+")
    yield (
        topic,
        "Recipe paper: query mode minus standard mode, points",
        gain,
        "+2.35 (poster)",
        compared(claim.over_seeds),
    )
    best = {"stl10-paper": "prl-query-unfrozen-mlp", "stl10-strong": "prl-query-unfrozen-linear"}
    for name, method in best.items():
        ours, base = (shown(score(name, one)) for one in (method, "supervised-resnet18"))
        verdict = verdict_of(name, method, "supervised-resnet18")
        yield topic, f"Recipe {name[6:]}: best prototypes, test %", ours, f"{base} (supervised, here)", verdict
    value = score("stl10-strong", best["stl10-strong"])
    yield topic, "Recipe strong: best prototypes, test %", shown(value), "85 (aim)", aimed(100 * value.mean, 85, 1)
    gap = less("stl10-schedule", "scheduled", "scheduled", "paper-utility", "paper-uniform")
    told = "STL-10, one objective per update: chosen by utility minus uniform, points"
    yield "[Schedules](schedules-prompts.md)", told, shown(gap, sign="+"), "0 (uniform)", compared(gap)


def _few_shot() -> Iterator[Line]:
    for (dataset, recipe, method), row in best_fewshot_rows().items():
        printed = row.published.scores.get("test") if row.published else None
        if printed is None or row.published is None:
            continue
        name, _, setting = dataset.rpartition("-")
        test = row.scores["test"]
        ours, published = 100 * test.mean, 100 * printed
        verdict = "at or above" if round(ours, 1) >= round(published, 1) else f"below by {published - ours:.1f}"
        told = f"{published:.1f} (published{', ' * bool(row.published.source)}{row.published.source})"
        verdict = "another test set" if row.other_data else verdict
        page = "conv4" if recipe == "conv4" and method in ("r2d2", "maml-transductive") else "few-shot"
        yield (
            "[Omniglot](omniglot.md)" if name.startswith("omniglot") else f"[Few-shot]({page}.md)",
            f"{name}, {shots(setting)}: {method} ({recipe}), test %",
            shown(test),
            told,
            verdict,
        )


def _transfer() -> Iterator[Line]:
    runs = [run for name in TRANSFER if source(name).is_file() for run in runs_of(source(name)).results]
    supervised, query, simclr = table_transfer.METHODS
    names = {supervised: "supervised", query: "query mode", simclr: "SimCLR"}
    labels, encoders = table_transfer.by_labels(runs), table_transfer.by_encoder(runs)
    pairs = [(query, supervised), (simclr, supervised), (query, simclr)]
    for key, (one, two) in product(table_transfer.table_order(labels), pairs):
        recipe, gaps = key[1], table_transfer.gaps_of(labels[key], one, two)
        asked = {f"Recipe {recipe}, {n} labels per class": gaps[n] for n in sorted(gaps) if n in (min(gaps), max(gaps))}
        for place, gap in table_transfer.gaps_of(encoders.get(("cifar-fs", recipe), {}), one, two).items():
            if place == ("5w5s", "centred"):
                asked[f"Recipe {recipe}, encoders on CIFAR-FS, 5-way 5-shot, head centred"] = gap
        for question, gap in asked.items():
            told = compared(gap) if gap.known else "one seed only"
            what = f"{question}: {names[one]} minus {names[two]}, points"
            yield "[Transfer](transfer.md)", what, shown(gap, sign="+"), f"0 ({names[two]})", told


def _text() -> Iterator[Line]:
    topic = "[Text](text.md)"
    for name in ("text-paper", "text-strong"):
        ours = shown(score(name, "proto"), percent=False)
        for base in ("cross", "pretrain-ce"):
            reference = f"{shown(score(name, base), percent=False)} (`{base}`)"
            question = f"Recipe {name[5:]}: prototypical pretraining, overall on dev"
            yield topic, question, ours, reference, verdict_of(name, "proto", base)
    value = score("text-strong", "proto")
    yield (
        topic,
        "Recipe strong: prototypical pretraining, overall on dev",
        shown(value, False),
        "0.740 (aim)",
        aimed(value.mean, 0.74, 3),
    )
    gap = less("text-schedule", "cross", "cross", "strong-bert-tiny-utility", "strong-bert-tiny-uniform")
    told = "Texts, one task per update: chosen by utility minus uniform, overall"
    yield "[Schedules](schedules-prompts.md)", told, shown(gap, False, "+"), "0 (uniform)", compared(gap)


def _prompts() -> Iterator[Line]:
    for name, reads in (("prompts-equal", "16,000"), ("prompts-40000-reads", "40,000")):
        for method in ("metapt-kmeans", "metapt-random"):
            for base in ("ppt", "multitask"):
                ours, reference = (shown(score(name, one)) for one in (method, base))
                question = f"{reads} reads: `{method}`, mean accuracy %"
                yield (
                    "[Prompts](prompts.md)",
                    question,
                    ours,
                    f"{reference} (`{base}`)",
                    verdict_of(name, method, base),
                )


def _schedules() -> Iterator[Line]:
    settings = (("schedule-aware", "aware"), ("schedule-agnostic", "agnostic"), ("schedule-minilm", "aware"))
    for name, setting in settings:
        for kind in ("exact", "taylor"):
            method, base = f"utility-{kind}-{setting}", f"uniform-{setting}"
            ours, reference = (shown(score(name, one, "target_loss"), False) for one in (method, base))
            verdict = compared(less(name, method, base, column="target_loss"), lower_is_better=True)
            told = f"{setting}{', MiniLM' * name.endswith('minilm')}"
            question = f"{told}: {kind} utilities, final target loss (lower is better)"
            yield "[Schedules](schedules.md)", question, ours, f"{reference} (uniform)", verdict


def median(name: str, row: str, begin: str, ours: bool) -> float | None:
    """The median of the contender of this name, else of the first whose name begins so; None where there is none."""
    rows = content(source(name))["rows"] if source(name).is_file() else []
    found = {
        one["name"]: one["median"] for one in rows if (one["row"], one["ours"]) == (row, ours) and not one["missing"]
    }
    return found.get(begin, next((rate for named, rate in found.items() if named.startswith(begin)), None))


# File, row, ours, peer, question (without ": times the speed of"), what the peer is, aim.
GRAPHS = {"recorded": "one CUDA", "compiled and recorded": "compiled, one"}
ONE_PASS, JITTED = "one pass as a CUDA graph", "jax, one jitted function"
AS_WRITTEN, PADDED = "Algorithm 1 as written", "padded to the longest row"
UTILITIES = {"exact utilities": ("exact, target_losses:", 1.5), "Taylor utilities": ("taylor, loss_many:", 2.0)}
SPEEDS: list[tuple[str, str, str, str, str, str, float | None]] = [
    *(
        (file, f"maml-omniglot-{steps}", ours, peer, f"MAML, {told}, {kind}", shown_as, aim_of)
        for steps, told, aim in (("1-step", "1 inner step", 15), ("5-steps", "5 inner steps", 20))
        for file, peer, shown_as, aim_of, default in (
            ("speed-h200", "learn2learn", "learn2learn", aim, "default (eager in that version)"),
            ("speed-h200-jax", "jax", "JAX", 1.2, "default"),
        )
        for kind, ours in ({default: "engine auto"} | GRAPHS).items()
    ),
    *(
        ("speed-h200-84", "maml-84-5-steps", ours, "jax", f"MAML, 84 x 84, 5 inner steps, {kind}", "JAX", 1.2)
        for kind, ours in ({"default": "engine auto"} | GRAPHS).items()
    ),
    *(
        ("speed-h200", f"decision-{kind}", ours, "Algorithm 1", f"decision by {told}, {kind}", AS_WRITTEN, aim)
        for kind in ("float32", "bfloat16")
        for told, (ours, aim) in UTILITIES.items()
    ),
    (
        "speed-h200",
        "train",
        "compiled, CUDA",
        "kernel by",
        "training of ResNet-18",
        "the same without CUDA graphs",
        None,
    ),
    ("speed-h200-text", "text-train", "TextStream, C", PADDED, "training on texts", "padding to the longest text", 3.0),
    *(
        (f"speed-h200-{name}", f"prompts-{name}", f"{ONE_PASS}{half}", f"task by task{half}", *told, 10)
        for name in ("t5-base", "smollm2")
        for half, kind in ((", bf16", "bf16"), ("", "float32"))
        for told in ((f"prompt MAML, shape of {name}, {kind}, recorded", "a loop over tasks"),)
    ),
    *(
        ("speed-h200-prompts-compiled", f"prompts-{name}", f"{ours}{half}", f"{JITTED}{half}", told, other, 1.2)
        for name, other in (("t5-base", "JAX on another H200"), ("smollm2", "JAX"))
        for half, precision in ((", bf16", "bf16"), ("", "float32"))
        for kind, ours in {"recorded": ONE_PASS, "compiled and recorded": f"{ONE_PASS}, compiled"}.items()
        for told in (f"prompt MAML, shape of {name}, {precision}, {kind}",)
    ),
    *(
        ("speed-h200-x2", f"scale-{what}", "2 processes", "1 process", f"two GPUs, {what}", "one process", 1.7)
        for what in ("tasks", "images", "tokens")
    ),
]


def _speed() -> Iterator[Line]:
    for name, row, begin, peer_begin, told, other, aim in SPEEDS:
        question = f"{told}: times the speed of {other}"
        page = "several-gpus" if name.endswith("-x2") else "speed-prompts" if row.startswith("prompts") else "speed-gpu"
        topic = f"[{'Several GPUs' if name.endswith('-x2') else 'Speed'}]({page}.md)"
        ours, peer = median(name, row, begin, True), median(name, row, peer_begin, False)
        reference = "-" if aim is None else f"{aim:g} (aim)"
        if ours is None or peer is None:
            yield topic, f"H200, {question}", MISSING, reference, MISSING
            continue
        ratio = ours / peer
        verdict = aimed(ratio, aim, 2) if aim is not None else "faster" if ratio > 1 else "slower"
        yield topic, f"H200, {question}", f"{ratio:.2f}", reference, verdict
        if row == "train":
            question = "H200, training of ResNet-18 with augmentation: images per second"
            yield topic, question, f"{ours:,.0f}", "25,000 (aim)", aimed(ours, 25_000, 0)


def summary() -> str:
    """The table, a number per cell."""
    lines = [line for part in (_stl10, _few_shot, _transfer, _text, _prompts, _schedules, _speed) for line in part()]
    order = list(dict.fromkeys(line[0] for line in lines))
    lines.sort(key=lambda line: order.index(line[0]))
    table = markdown_table(["topic", "question", "ours", "reference", "verdict"], lines)
    return "\n".join(table).replace("| --- | ---: | ---: | ---: | ---: |", "| --- | --- | ---: | ---: | --- |").strip()
