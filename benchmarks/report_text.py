"""The table of `run_text.py`: three tasks and their mean beside the paper's numbers."""

from __future__ import annotations

from metapretrain.evaluation.metrics import MAJORITY, main_scores
from metapretrain.report.layout import Column, Layout, Published, Runs
from metapretrain.report.notes import NOTES

TASKS = (
    Column("sst", "sst_accuracy", "SST accuracy %", True, True, "sst_dev", "proportion"),
    Column("para", "para_accuracy", "PARA accuracy %", True, True, "para_dev", "proportion", marked=True),
    Column("sts", "sts_pearson", "STS Pearson", False, True, "sts_dev", "correlation", marked=True),
)
NAMES = ("sst", "para", "sts")
SEEN = (
    "was trained for sentence similarity, on data that holds Quora's duplicate questions, so its PARA, STS and overall "
    "numbers cannot be compared with those of an encoder that saw none, such as the paper's BERT-base"
)


def _printed(*dev: float, source: str = "", star: bool = False, test: tuple[float, ...] = ()) -> Published:
    """SST, PARA, STS and their mean, of the dev parts and of the course's test sets, which come without labels."""
    names = (*NAMES, "overall")
    return Published(
        dict(zip(names, dev, strict=True)), source, not star, dict(zip(names, test, strict=True)) if test else {}
    )


# R. Sikand and A. Yeung, "Prototypical Pre-Training for Robust Multi-Task Learning in Natural Language Processing",
# table 1 (dev), with the methods that only their poster has. Stars: 10 epochs where the others had 20. The poster's
# "Prototypical Pre-trained" encodes the sentences of a pair separately (text paper, appendix A.2). Test: table 2.
PAPER = {
    "baseline": _printed(0.327, 0.648, 0.264, 0.413),
    "unfrozen": _printed(0.490, 0.782, 0.383, 0.552),
    "combine-add": _printed(0.351, 0.625, 0.290, 0.422, source="poster", star=True),
    "combine-mult": _printed(0.487, 0.692, 0.367, 0.515, source="poster", star=True),
    "combine-concat": _printed(0.490, 0.664, 0.289, 0.481, source="poster", star=True),
    "cosine": _printed(0.490, 0.759, 0.702, 0.650),
    "weighted-sst": _printed(0.502, 0.629, 0.465, 0.532, star=True),
    "weighted-para": _printed(0.321, 0.727, 0.369, 0.472, star=True),
    "weighted-sts": _printed(0.296, 0.639, 0.571, 0.502, star=True),
    "shared": _printed(0.479, 0.694, 0.259, 0.477, star=True),
    "cross": _printed(0.496, 0.805, 0.833, 0.711),
    "proto-separate": _printed(0.498, 0.779, 0.735, 0.670, source="poster", test=(0.524, 0.780, 0.714, 0.672)),
    "proto": _printed(0.490, 0.825, 0.857, 0.724, test=(0.513, 0.822, 0.849, 0.728)),
}


def _further(name: str, title: str, legend: str = "", percent: bool = False, marked: bool = True) -> Column:
    return Column(name, name, title, percent, True, marked=marked, legend=legend)


def _prototype(task: Column) -> Column:
    metric, title = f"nearest_prototype_{task.metric}", f"nearest prototype: {task.title}"
    return Column(f"nearest_prototype_{task.name}", metric, title, task.percent, True, marked=task.marked)


LAYOUT = Layout(
    columns=(*TASKS, Column("overall", "overall", "overall", False, parts=NAMES, marked=True, drawn="overall on dev")),
    main="overall",
    legend=(
        "Dev sets; mean ± half-width of the 95% interval over seeds (Student t). Overall: plain mean of the tasks' "
        "numbers, as in the paper. Majority class: the most frequent one of training; a constant prediction has no "
        "correlation, so 0."
    ),
    further=(
        _further("para_f1", "PARA F1 %", percent=True),
        _further("sts_spearman", "STS Spearman"),
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
        _further("nearest_prototype_overall", "nearest prototype: overall"),
        _further(
            "validation_overall",
            "validation: overall",
            "Validation: training rows held back for choices.",
            marked=False,
        ),
    ),
    further_legend=(
        "Nearest prototype: the class of the nearest mean training embedding, without a head. For STS the classes are "
        "rounded scores; after an ordinal pretraining, the score expected under its prototypes."
    ),
    baselines=(("cross",), ("pretrain-ce",)),
    first_row=True,
    compared=(*NAMES, "overall", "overall_without_para"),
    published={"cs224n": PAPER, "cs224n-qqp": PAPER},  # qqp: more PARA pairs to train on, the same dev sets
    published_title="paper: SST / PARA / STS / overall",
    published_counts={"sst_dev": 1101, "para_dev": 20_212, "sts_dev": 863},
    published_about="The paper: BERT-base, no seeds named, 141k PARA pairs to train on",
    published_count="para_train",
    cited=(*NAMES, "overall"),
    star="trained for 10 epochs in the paper, the other methods for 20: not comparable with them",
    aliases={"combine-mult": "unfrozen"},  # appendix A.1.1 multiplies
    majority=MAJORITY,
    open=True,
    notes=("tasks",),
    similarity=SEEN,
)


def tasks_notes(by_method: Runs, layout: Layout) -> list[str]:
    """Which methods were not measured on all tasks, and whose means are over other tasks."""
    notes = []
    tasks: dict[str, list[str]] = {}
    partly = []
    for name, runs in by_method.items():
        whole = [run for run in runs.values() if run["metrics"].get(layout.column(layout.main).metric) is not None]
        partly += [name] * (len(whole) < len(runs))
        measured = [{metric: 0.0 for metric, value in run["metrics"].items() if value is not None} for run in whole]
        for told in {" ".join(sorted(main_scores(metrics))) or "unknown" for metrics in measured}:
            tasks.setdefault(told, []).append(name)
    if partly:
        notes.append(f"Not on all tasks, so without a number in column {layout.main}: {', '.join(partly)}.")
    if len(tasks) > 1:
        told = "; ".join(f"{', '.join(names)}: {which}" for which, names in tasks.items())
        notes.append(f"The numbers in column {layout.main} are means over different tasks. {told}.")
    return notes


NOTES["tasks"] = tasks_notes
