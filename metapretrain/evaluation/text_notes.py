"""What must stand beside the figures of text runs: what the encoder has seen, and how the paper's differ."""

from __future__ import annotations

import re
from collections.abc import Mapping

from metapretrain.evaluation.cells import published_text
from metapretrain.evaluation.layout import Result, Runs
from metapretrain.evaluation.published import TEXT_TEST, Published
from metapretrain.evaluation.text_columns import OVERALL, TASKS
from metapretrain.evaluation.text_scores import main_scores

SIMILARITY = re.compile(r"(^|[/:_-])(all-(minilm|mpnet|distilroberta|roberta)|paraphrase-)|^minilm$", re.IGNORECASE)
SEEN = (
    "was trained for sentence similarity, on data that holds Quora's duplicate questions: its PARA and STS figures, "
    "and the overall ones, are no comparison with an encoder that saw none, such as the paper's BERT-base"
)


def encoder_remark(encoder: str) -> str:
    """Return what a reader of PARA and STS figures must know of the encoder; "" where there is nothing.

    Args:
        encoder: name or path as in the results, "" where they name none.

    Example:
        >>> encoder_remark("minilm")[:52], encoder_remark("bert-base-uncased")
        ('MiniLM (all-MiniLM-L6-v2) was trained for sentence s', '')
    """
    if not encoder:
        return f"These results do not name their encoder. MiniLM (all-MiniLM-L6-v2) {SEEN}."
    if SIMILARITY.search(encoder) is None:
        return ""
    known = encoder == "minilm" or encoder.lower().endswith("all-minilm-l6-v2")
    return f"{'MiniLM (all-MiniLM-L6-v2)' if known else encoder} {SEEN}."


def text_notes(by_method: Runs, published: Mapping[str, Published]) -> list[str]:
    """Return the notes below the tables: training pairs, the paper's other figures, tasks that differ.

    Args:
        by_method: method to seed to result.
        published: method to the paper's figures, for the data set of these runs.
    """
    notes = []
    cited = [published[name] for name in by_method if name in published]
    if cited:
        pairs = sorted({run.get("counts", {}).get("para_train") for runs in by_method.values() for run in runs.values()}
                       - {None})  # fmt: skip
        ours = f"; here: {' or '.join(f'{n:,}' for n in pairs)}" if pairs else ""
        notes.append(f"The paper: BERT-base, no seeds named, 141k PARA pairs to train on{ours}.")
    for name, figures in TEXT_TEST.items():
        if name in by_method and name in published:
            source = published[name].source or "paper"
            notes.append(f"The {source}'s {name} on its test set, which no run here sees: {figures_of(figures)}.")
    tasks: dict[str, list[str]] = {}
    partly = []
    for name, runs in by_method.items():
        whole = [run for run in runs.values() if run["metrics"].get("overall") is not None]
        partly += [name] * (len(whole) < len(runs))
        for told in {_tasks_of(run) for run in whole}:
            tasks.setdefault(told, []).append(name)
    if partly:
        notes.append(f"Not on all tasks, so without an overall figure: {', '.join(partly)}.")
    if len(tasks) > 1:
        told = "; ".join(f"{', '.join(names)}: {which}" for which, names in tasks.items())
        notes.append(f"The overall figures are means over different tasks. {told}.")
    return notes


def _tasks_of(run: Result) -> str:
    metrics = {name: 0.0 for name, value in run["metrics"].items() if value is not None}
    return " ".join(sorted(main_scores(metrics))) or "unknown"


def figures_of(scores: Mapping[str, float | None]) -> str:
    """`49.0 / 82.5 / 0.857 / 0.724`: figures of the text table's columns as the paper prints them.

    Example:
        >>> figures_of({"sst": 0.49, "sts": 0.857, "overall": None})
        '49.0 / 0.857 / -'
    """
    columns = {column.name: column for column in (*TASKS, OVERALL)}
    return " / ".join(published_text(columns[name], value) for name, value in scores.items())
