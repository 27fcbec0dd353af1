"""What a reader of few-shot figures must know: how many test episodes, how sure, and whether transductive."""

from __future__ import annotations

from collections.abc import Mapping

from metapretrain.evaluation.results import Result


def episode_notes(by_method: Mapping[str, Mapping[int, Result]]) -> list[str]:
    """Return a line for each method whose results were measured over episodes, in the order of their names.

    Example:
        >>> run = {"metrics": {"test_accuracy": 0.9, "test_ci95": 0.002}, "counts": {"test_episodes": 600}}
        >>> episode_notes({"maml": {0: {**run, "transductive": True}}})
        ['maml: 600 test episodes a run, \u00b1 0.20 points over episodes; transductive.']
    """
    notes = []
    for method in sorted(by_method):
        runs = by_method[method].values()
        numbers = sorted({run.get("counts", {}).get("test_episodes") for run in runs} - {None})
        if not numbers:
            continue
        widths = [run["metrics"].get("test_ci95") for run in runs]
        known = [float(width) for width in widths if width is not None]
        told = f", \u00b1 {100 * sum(known) / len(known):.2f} points over episodes" if known else ""
        kinds = {bool(run.get("transductive")) for run in runs}
        kind = "some runs transductive" if len(kinds) > 1 else "transductive" if True in kinds else "not transductive"
        notes.append(f"{method}: {' or '.join(f'{n:,}' for n in numbers)} test episodes a run{told}; {kind}.")
    return notes
