"""The layouts of the five benchmarks, and the figures that their papers published."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from metapretrain.evaluation.metrics import MAJORITY, PREFIXES, main_scores
from metapretrain.report.layout import Column, Layout, Published
from metapretrain.report.notes import prompt_notes, schedule_notes, text_notes

TASKS = (
    Column("sst", "sst_accuracy", "SST accuracy %", True, True, "sst_dev", "proportion"),
    Column("para", "para_accuracy", "PARA accuracy %", True, True, "para_dev", "proportion", marked=True),
    Column("sts", "sts_pearson", "STS Pearson", False, True, "sts_dev", "correlation", marked=True),
)
OVERALL = Column(
    "overall", "overall", "overall", False, parts=("sst", "para", "sts"), marked=True, drawn="overall on dev"
)


SETS = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")
PAIRS = ("rte", "mrpc")

PROMPTS = Layout(
    columns=(
        Column("mean", "mean_accuracy", "mean %", parts=SETS, drawn="mean accuracy over sets"),
        *(
            Column(name, f"{name}_accuracy", f"{name} %", True, True, f"{name}_test", "proportion")
            for name in (*SETS, *PAIRS)
        ),
    ),
    main="mean",
    legend=(
        "Accuracy on test rows, the same for all rows and seeds; mean ± half-width of the 95% interval over seeds "
        "(Student t). Majority class: the most frequent one of the training part. Zero-shot: the hard text alone."
    ),
    further=(
        Column("mean_f1", "mean_f1", "macro-F1: mean %"),
        *(Column(f"{name}_f1", f"{name}_f1", f"{name} %", True, True) for name in (*SETS, *PAIRS)),
        Column("validation_mean", "validation_mean_accuracy", "validation: mean %", True, True),
    ),
    further_legend="Macro-F1: plain mean of the F1 of each class, so that the majority class alone is no good answer.",
    baselines=(("ppt",), ("multitask",)),
    first_row=True,
    compared=("mean", "mean_f1", *SETS),
    published="paper: " + " / ".join(SETS),
    cited=SETS,
    star="pretrained on other data in the paper",
    majority="majority_",
    notes=prompt_notes,
    part="test",
)


# For each comparison the first of these methods that a group of runs has.
BASELINES = (("supervised-resnet18", "supervised"), ("simclr", "simclr-unfrozen", "simclr-frozen"))


IMAGES = Layout(
    columns=(
        Column("test", "test_accuracy", "test %", examples="test", interval="proportion", drawn="test accuracy"),
        Column("train", "train_accuracy", "train %"),
        Column("nearest_prototype", "nearest_prototype_accuracy", "nearest prototype %"),
        Column("knn", "knn_accuracy", "kNN %"),
        Column("validation", "validation_accuracy", "validation %"),
        Column(
            "corrupt",
            "corrupt_accuracy",
            "corrupted %",
            optional=True,
            legend="Corrupted: test images, mean over the standard corruptions and their severities.",
        ),
    ),
    main="test",
    legend=(
        "Mean ± half-width of the 95% interval over seeds (Student t). Test set 95%: Wilson interval at the "
        "mean, for the number of test images. Nearest prototype: the class of the nearest mean training "
        "embedding, without a head. Validation: training images held back for choices."
    ),
    baselines=BASELINES,
    published="published test / train",
    cited=("test", "train"),
)

FEWSHOT = Layout(
    columns=(
        Column("test", "test_accuracy", "test episodes %", drawn="test accuracy"),
        Column("episodes", "test_ci95", "± over episodes"),
        Column("validation", "validation_accuracy", "validation episodes %"),
    ),
    main="test",
    legend=(
        "Mean ± half-width of the 95% interval over seeds (Student t). ± over episodes: half-width of the 95% interval "
        "over a run's test episodes, which are the same for every run."
    ),
    cited=("test",),
)


def _prototype(task: Column) -> Column:
    metric, title = f"nearest_prototype_{task.metric}", f"nearest prototype: {task.title}"
    return Column(f"nearest_prototype_{task.name}", metric, title, task.percent, True, marked=task.marked)


def _text_tasks(names: Collection[str]) -> list[Column]:
    found = []
    for task in sorted(main_scores(dict.fromkeys(names, 0.0))):
        share = f"{task}_accuracy" in names
        metric, kind = ("accuracy", "proportion") if share else ("pearson", "correlation")
        title = f"{task.upper()} {'accuracy %' if share else 'Pearson'}"
        found.append(Column(task, f"{task}_{metric}", title, share, True, f"{task}_dev", kind))
    return found


TEXT = Layout(
    columns=(*TASKS, OVERALL),
    main="overall",
    legend=(
        "Dev sets; mean ± half-width of the 95% interval over seeds (Student t). Overall: plain mean of the tasks' "
        "figures, as in the paper. Majority class: the most frequent one of training; a constant has no correlation, "
        "so 0."
    ),
    further=(
        Column("para_f1", "para_f1", "PARA F1 %", True, True, marked=True),
        Column("sts_spearman", "sts_spearman", "STS Spearman", False, True, marked=True),
        Column(
            "overall_without_para",
            "overall_without_para",
            "overall without PARA",
            False,
            True,
            parts=("sst", "sts"),
            marked=True,
        ),
        *(_prototype(task) for task in TASKS),
        Column(
            "nearest_prototype_overall",
            "nearest_prototype_overall",
            "nearest prototype: overall",
            False,
            True,
            marked=True,
        ),
        Column(
            "validation_overall",
            "validation_overall",
            "validation: overall",
            False,
            True,
            legend="Validation: training rows held back for choices.",
        ),
    ),
    further_legend=(
        "Nearest prototype: the class of the nearest mean training embedding, without a head; for STS the classes "
        "are rounded scores."
    ),
    baselines=(("cross",), ("pretrain-ce",)),
    first_row=True,
    compared=("sst", "para", "sts", "overall", "overall_without_para"),
    published="paper: SST / PARA / STS / overall",
    cited=("sst", "para", "sts", "overall"),
    star="trained for 10 epochs in the paper, the other rows for 20: not comparable with them",
    aliases={"combine-mult": "unfrozen"},
    majority=MAJORITY,
    notes=text_notes,
    open=_text_tasks,
)

_DOWNSTREAM = {
    "wic": "accuracy",
    "mrpc": "accuracy",
    "qnli": "accuracy",
    "rte": "accuracy",
    "cola": "matthews",
    "conll04": "f1",
    "conll2003": "f1",
    "squad": "f1",
    "cb": "accuracy",
    "copa": "accuracy",
}
_TITLES = {"accuracy": "accuracy %", "f1": "F1 %", "matthews": "Matthews"}


def _downstream(task: str, metric: str) -> Column:
    kind = "proportion" if metric == "accuracy" else None
    return Column(
        task, f"{task}_{metric}", f"{task} {_TITLES[metric]}", metric != "matthews", True, f"{task}_test", kind
    )


def _schedule_tasks(names: Collection[str]) -> list[Column]:
    found: dict[str, set[str]] = {}
    for name in names:
        task, _, metric = name.rpartition("_")
        if task and metric in _TITLES and not name.startswith(PREFIXES) and not task.endswith("_macro"):
            found.setdefault(task, set()).add(metric)
    columns = []
    for task in sorted(found.keys() - _DOWNSTREAM.keys()):
        # Sentences are scored by all three, the main one being accuracy; labels, spans and relations by F1.
        order = ("accuracy", "matthews") if "matthews" in found[task] else ("f1", "accuracy")
        columns.append(_downstream(task, next(metric for metric in order if metric in found[task])))
    return columns


SCHEDULE = Layout(
    columns=(
        Column("downstream", "downstream", "downstream %", drawn="mean over downstream tasks"),
        *(_downstream(task, metric) for task, metric in _DOWNSTREAM.items()),
    ),
    main="downstream",
    legend=(
        "Test parts of tasks that were no target, after fine-tuning with the same small budget; mean ± half-width of "
        "the 95% interval over seeds (Student t). Downstream: plain mean of the tasks' figures."
    ),
    further=(
        Column("target_loss", "target_loss", "target loss", False),
        Column("probe_share", "probe_share", "probes, % of compute"),
        Column("taylor_rank_correlation", "taylor_rank_correlation", "Taylor: rank correlation", False, True),
        Column("taylor_regret", "taylor_regret", "Taylor: regret", False, True),
        Column("peak_memory", "peak_memory_mib", "peak memory, MiB", False, True),
        Column("validation_downstream", "validation_downstream", "validation: downstream %"),
    ),
    further_legend=(
        "Target loss: mean over the setting's targets on rows that no utility saw; aware and agnostic rows have other "
        "targets. Taylor: agreement of its utilities with exact ones on the same batches, mean over the evaluations; "
        "the regret is 0 where its first source is the best one and 1 where it is the worst."
    ),
    baselines=(("uniform-aware",), ("uniform-agnostic",)),
    first_row=True,
    compared=("downstream", *_DOWNSTREAM),
    notes=lambda by_method, _: schedule_notes(by_method),
    open=_schedule_tasks,
    part="test",
    settings=("aware", "agnostic"),
)

LAYOUTS: Mapping[str, Layout] = {"fewshot": FEWSHOT, "text": TEXT, "schedule": SCHEDULE, "prompts": PROMPTS}


def layout_of(benchmark: str, metrics: Iterable[str] = ()) -> Layout:
    """Return the layout of a benchmark, that of images for one that has none of its own.

    Args:
        benchmark: as in a result.
        metrics: names of the metrics that its results hold: other tasks than those listed get a column each, in an
            open layout.

    Example:
        >>> layout_of("stl10").main, [column.name for column in layout_of("text").columns]
        ('test', ['sst', 'para', 'sts', 'overall'])
        >>> [column.title for column in layout_of("text", ["sst_accuracy", "topic_accuracy", "overall"]).columns]
        ['SST accuracy %', 'PARA accuracy %', 'STS Pearson', 'TOPIC accuracy %', 'overall']
    """
    layout = LAYOUTS.get(benchmark, IMAGES)
    names = set(metrics)
    if not layout.open or not names:
        return layout
    listed = {column.metric for column in layout.columns}
    added = [column for column in layout.open(names) if column.metric not in listed]
    known = {column.name for column in layout.columns if column.metric in names} | {column.name for column in added}
    tasks = tuple(column for column in (*layout.columns, *added) if not column.parts)
    means = tuple(_mean_over(column, tasks, known) for column in layout.columns if column.parts)
    further = tuple(_mean_over(column, tasks, known) if column.parts else column for column in layout.further)
    compared = {column.name for column in added} | set(layout.compared)
    ordered = tuple(column.name for column in (*tasks, *means, *further) if column.name in compared)
    return replace(layout, columns=tasks + means, further=further, compared=ordered)


def _mean_over(column: Column, tasks: tuple[Column, ...], known: set[str]) -> Column:
    """A mean over the tasks that were measured."""
    left_out = column.name.rpartition("_without_")[2] if "_without_" in column.name else None
    parts = tuple(task.name for task in tasks if task.name in known and task.name != left_out)
    return replace(column, parts=parts)


def _images(test: float, train: float | None = None) -> Published:
    """Accuracies; the poster names neither seeds nor the number of test images."""
    return Published({"test": test, "train": train})


def _text(sst: float, para: float, sts: float, overall: float, source: str = "", star: bool = False) -> Published:
    return Published({"sst": sst, "para": para, "sts": sts, "overall": overall}, source, not star)


# R. Sikand, "Prototypical Pre-Training for Visual Representation Learning", poster, table "Results", by row.
STL10_POSTER: dict[str, Published] = {
    "supervised-mlp": _images(0.414, 0.591),
    "supervised-resnet18": _images(0.625, 0.984),
    "simclr": _images(0.646, 0.965),
    "prl-standard-frozen-linear": _images(0.607, 0.997),
    "prl-standard-frozen-mlp": _images(0.606, 0.998),
    "prl-standard-unfrozen-linear": _images(0.638, 0.999),
    "prl-standard-unfrozen-mlp": _images(0.602, 0.989),
    "prl-query-unfrozen-linear": _images(0.636, 0.997),
    "prl-query-frozen-linear": _images(0.642, 0.999),
    "prl-query-unfrozen-mlp": _images(0.638, 0.999),
    "prl-query-frozen-mlp": _images(0.631, 0.996),
}

# Omniglot with the split of Vinyals et al. (2016). ProtoNet: Snell et al. (2017), table 1; MAML: Finn et al. (2017),
# table 1, convolutional.
OMNIGLOT: dict[str, Mapping[str, Published]] = {
    f"omniglot-{setting}": {"protonet": _images(proto), "maml": _images(maml)}
    for setting, proto, maml in (
        ("5w1s", 0.988, 0.987),
        ("5w5s", 0.997, 0.999),
        ("20w1s", 0.960, 0.958),
        ("20w5s", 0.989, 0.989),
    )
}

# R. Sikand and A. Yeung, "Prototypical Pre-Training for Robust Multi-Task Learning in Natural Language Processing",
# table 1 (dev), with the rows that only their poster has. Stars: 10 epochs where the others had 20. The poster's
# "Prototypical Pre-trained" encodes the sentences of a pair separately (text paper, appendix A.2).
TEXT_PAPER: dict[str, Published] = {
    "baseline": _text(0.327, 0.648, 0.264, 0.413),
    "unfrozen": _text(0.490, 0.782, 0.383, 0.552),
    "combine-add": _text(0.351, 0.625, 0.290, 0.422, "poster", star=True),
    "combine-mult": _text(0.487, 0.692, 0.367, 0.515, "poster", star=True),
    "combine-concat": _text(0.490, 0.664, 0.289, 0.481, "poster", star=True),
    "cosine": _text(0.490, 0.759, 0.702, 0.650),
    "weighted-sst": _text(0.502, 0.629, 0.465, 0.532, star=True),
    "weighted-para": _text(0.321, 0.727, 0.369, 0.472, star=True),
    "weighted-sts": _text(0.296, 0.639, 0.571, 0.502, star=True),
    "shared": _text(0.479, 0.694, 0.259, 0.477, star=True),
    "cross": _text(0.496, 0.805, 0.833, 0.711),
    "proto-separate": _text(0.498, 0.779, 0.735, 0.670, "poster"),
    "proto": _text(0.490, 0.825, 0.857, 0.724),
}
# Table 2 of the paper and of the poster: the course's test sets, which come without labels.
TEXT_TEST: dict[str, Mapping[str, float | None]] = {
    "proto-separate": _text(0.524, 0.780, 0.714, 0.672).scores,
    "proto": _text(0.513, 0.822, 0.849, 0.728).scores,
}


def _prompts(*scores: float, star: bool = False) -> Published:
    """Accuracies on SST-5, SST-2, Amazon-5, Amazon-2, SentiHood, SemEval restaurant and laptop, or on SST-5 alone."""
    return Published(dict(zip(SETS, scores, strict=False)), comparable=not star)


# Y. Huang, K. Qian and Z. Yu, "Learning a Better Initialization for Soft Prompts via Meta-Learning", table 1, and
# table 2 (SST-5 alone) for the ways to make meta tasks. Their PPT was pretrained on pseudo labels.
_PPT = (0.4290, 0.8742, 0.5115, 0.9328, 0.8006, 0.6204, 0.5637)
PROMPT_PAPER: dict[str, Published] = {
    "ft": _prompts(0.4357, 0.8827, 0.4840, 0.9235, 0.8211, 0.7101, 0.6248),
    "ppt": _prompts(*_PPT, star=True),
    "ppt-pseudo": _prompts(*_PPT),
    "metapt-pseudo": _prompts(0.4526, 0.8947, 0.5547, 0.9443, 0.8038, 0.7693, 0.7086),
    "metapt-kmeans": _prompts(0.4624, 0.8726, 0.5873, 0.9539, 0.7827, 0.8072, 0.7232),
    "metapt-lda": _prompts(0.4410),
    "metapt-random": _prompts(0.4295),
    "metapt-label": _prompts(0.4284),
}

PUBLISHED: dict[str, Mapping[str, Published]] = {
    "yelp5": PROMPT_PAPER,
    "stl10": STL10_POSTER,
    **OMNIGLOT,
    "cs224n": TEXT_PAPER,
    "cs224n-qqp": TEXT_PAPER,  # more PARA pairs to train on, the same dev sets
}


def published_for(
    dataset: str, recipe: str, published: Mapping[str, Mapping[str, Published]] = PUBLISHED
) -> Mapping[str, Published]:
    """The figures that may stand beside runs of a data set: none for smoke runs, which see a part of it only.

    Example:
        >>> published_for("stl10", "paper")["simclr"].scores["test"], len(published_for("stl10", "paper-smoke"))
        (0.646, 0)
    """
    return {} if "smoke" in recipe.split("-") else published.get(dataset, {})
