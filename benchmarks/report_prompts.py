"""The table of `run_prompts.py`: sentiment sets and their mean beside the paper's figures."""

from __future__ import annotations

from metapretrain.report.layout import Column, Layout, Published, Runs
from metapretrain.report.notes import NOTES

SETS = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")
PAIRS = ("rte", "mrpc")


def _printed(*scores: float, star: bool = False) -> Published:
    """Accuracies on the sets, or on SST-5 alone."""
    return Published(dict(zip(SETS, scores, strict=False)), comparable=not star)


# Y. Huang, K. Qian and Z. Yu, "Learning a Better Initialization for Soft Prompts via Meta-Learning", table 1, and
# table 2 (SST-5 alone) for the ways to make meta tasks. Their PPT was pretrained on pseudo labels.
_PPT = (0.4290, 0.8742, 0.5115, 0.9328, 0.8006, 0.6204, 0.5637)
PAPER = {
    "ft": _printed(0.4357, 0.8827, 0.4840, 0.9235, 0.8211, 0.7101, 0.6248),
    "ppt": _printed(*_PPT, star=True),
    "ppt-pseudo": _printed(*_PPT),
    "metapt-pseudo": _printed(0.4526, 0.8947, 0.5547, 0.9443, 0.8038, 0.7693, 0.7086),
    "metapt-kmeans": _printed(0.4624, 0.8726, 0.5873, 0.9539, 0.7827, 0.8072, 0.7232),
    "metapt-lda": _printed(0.4410),
    "metapt-random": _printed(0.4295),
    "metapt-label": _printed(0.4284),
}

LAYOUT = Layout(
    columns=(
        Column("mean", "mean_accuracy", "mean %", parts=SETS, drawn="mean accuracy over sets"),
        *(
            Column(name, f"{name}_accuracy", f"{name} %", True, True, f"{name}_test", "proportion")
            for name in (*SETS, *PAIRS)
        ),
    ),
    main="mean",
    legend=(
        "Accuracy on test examples, the same for all methods and seeds; mean ± half-width of the 95% interval over "
        "seeds (Student t). Majority class: the most frequent one of the training part. Zero-shot: the written "
        "template without a trained prompt."
    ),
    further=(
        Column("mean_f1", "mean_f1", "macro-F1: mean %"),
        *(Column(f"{name}_f1", f"{name}_f1", f"{name} %", True, True) for name in (*SETS, *PAIRS)),
        Column("validation_mean", "validation_mean_accuracy", "validation: mean %", True, True),
    ),
    further_legend="Macro-F1: plain mean of the F1 of each class; a constant answer scores low.",
    baselines=(("ppt",), ("multitask",)),
    first_row=True,
    compared=("mean", "mean_f1", *SETS),
    published={"yelp5": PAPER},
    published_title="paper: " + " / ".join(SETS),
    published_about=(
        "The paper: T5-base, 5 seeds, Amazon-2 of Zhang et al. (2015), which is another set than here; its PPT was "
        "pretrained on pseudo labels, its MetaPT(Y), beside metapt-kmeans, on 650,000 reviews of Yelp"
    ),
    cited=SETS,
    star="pretrained on other data in the paper",
    majority="majority_",
    notes=("reads", "diverged", "aim"),
    aim=0.01,
    part="test",
)


def reads_notes(by_method: Runs, layout: Layout) -> list[str]:
    """What each pretraining read and cost: reads, passes and seconds, means over seeds."""
    trained = {}
    for name, runs in by_method.items():
        budgets = [run.get("budget", {}) for run in runs.values()]
        costs = [[one.get(f"pretrain_{of}", 0) for one in budgets] for of in ("reads", "passes")]
        costs.append([run.get("pretrain_wall_s") or 0.0 for run in runs.values()])
        read, passes, wall = (sum(part) / len(part) for part in costs)
        if round(read):
            trained[name] = (round(read), round(passes), wall)
    if not trained:
        return []
    each = (f"{name} {reads:,} reads, {passes:,} passes, {s:,.0f} s" for name, (reads, passes, s) in trained.items())
    equal = "Equal reads" if len({read for read, _, _ in trained.values()}) == 1 else "Unequal reads"
    every = [passes for _, passes, _ in trained.values()]
    if equal.startswith("Un") and min(every) > 0.99 * max(every):
        equal = "Unequal reads, but equal passes"
    return [
        f"Pretraining, once for all sets, mean over seeds. {equal} (support and query examples). A pass is one "
        f"sequence forward or backward; a backward pass of second order counts as two: {'; '.join(each)}."
    ]


def diverged_notes(by_method: Runs, layout: Layout) -> list[str]:
    """How many trainings of each method diverged."""
    lost = {n: sum(run.get("budget", {}).get("diverged", 0) for run in by_method[n].values()) for n in by_method}
    told = "; ".join(f"{name} {count:,}" for name, count in lost.items() if count)
    begin = "Trainings that diverged, of pretraining and of all seeds and sets; the best weights before that, or the "
    return [f"{begin}start, were kept: {told}."] if told else []


NOTES |= {"reads": reads_notes, "diverged": diverged_notes}
