"""Which metrics the table of a benchmark shows, in which order, and what its rows are compared by.

A new benchmark is one `Layout` in `LAYOUTS`: its columns name entries of a result's "metrics", its notes
are said below the tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from metapretrain.evaluation.layout import Column as Column
from metapretrain.evaluation.layout import Layout as Layout
from metapretrain.evaluation.prompt_columns import PROMPTS
from metapretrain.evaluation.schedule_notes import schedule_notes
from metapretrain.evaluation.text_columns import OVERALL, TASKS
from metapretrain.evaluation.text_notes import text_notes
from metapretrain.evaluation.text_scores import MAJORITY, PREFIXES, main_scores

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
            "corrupt", "corrupt_accuracy", "corrupted %", optional=True,
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
)  # fmt: skip

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
)  # fmt: skip


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
    columns=(
        *TASKS,
        OVERALL,
    ),
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
            "overall_without_para", "overall_without_para", "overall without PARA", False, True,
            parts=("sst", "sts"), marked=True,
        ),
        *(_prototype(task) for task in TASKS),
        Column(
            "nearest_prototype_overall", "nearest_prototype_overall", "nearest prototype: overall", False, True,
            marked=True,
        ),
        Column(
            "validation_overall", "validation_overall", "validation: overall", False, True,
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
)  # fmt: skip

_DOWNSTREAM = {
    "wic": "accuracy", "mrpc": "accuracy", "qnli": "accuracy", "rte": "accuracy", "cola": "matthews", "conll04": "f1",
    "conll2003": "f1", "squad": "f1", "cb": "accuracy", "copa": "accuracy",
}  # fmt: skip
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
)  # fmt: skip

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
