"""Scores of text tasks: the names in a result file, their means, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from scipy import stats
from sklearn import metrics as sklearn_metrics

from metapretrain.data.made import made_tasks
from metapretrain.data.texts import TextSet, TextTask
from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import (
    MAJORITY,
    PROTOTYPE,
    main_scores,
    majorities,
    majority,
    overall,
    score_task,
    with_overall,
)


@pytest.fixture(scope="module")
def tasks() -> list[TextTask]:
    return made_tasks(rows=64)


def noisy(tasks: list[TextTask]) -> dict[str, torch.Tensor]:
    """Predictions that are right in about two thirds of the rows."""
    random = torch.Generator().manual_seed(0)
    found = {}
    for task in tasks:
        y = task.dev.require_labels()
        keep = torch.rand(len(y), generator=random) < 0.67
        found[task.name] = torch.where(keep, y, y[torch.randperm(len(y), generator=random)])
    return found


def test_every_figure_is_the_reference_librarys(tasks: list[TextTask]) -> None:
    predicted = noisy(tasks)
    found = [score_task(task, predicted[task.name]) for task in tasks]
    scores = with_overall({name: value for scored in found for name, value in scored.items()})
    right = {task.name: task.dev.require_labels() for task in tasks}
    expected = {
        "sst_accuracy": sklearn_metrics.accuracy_score(right["sst"], predicted["sst"]),
        "para_accuracy": sklearn_metrics.accuracy_score(right["para"], predicted["para"]),
        "para_f1": sklearn_metrics.f1_score(right["para"], predicted["para"]),
        "sts_pearson": stats.pearsonr(right["sts"].double(), predicted["sts"].double()).statistic,
        "sts_spearman": stats.spearmanr(right["sts"], predicted["sts"]).statistic,
    }
    for name, value in expected.items():
        assert scores[name] == pytest.approx(float(value), abs=1e-12), name
    main = [scores["sst_accuracy"], scores["para_accuracy"], scores["sts_pearson"]]
    assert scores["overall"] == pytest.approx(sum(main) / 3)
    assert scores["overall_without_para"] == pytest.approx((main[0] + main[2]) / 2)


def test_majority_is_of_the_training_rows() -> None:
    train = TextSet(list("abcde"), labels=torch.tensor([2, 2, 2, 0, 1]))
    dev = TextSet(list("wxyz"), labels=torch.tensor([0, 0, 0, 2]))
    task = TextTask("sst", "classification", train, train.subset([]), dev, classes=("a", "b", "c"))
    assert majority(task) == {"majority_sst_accuracy": 0.25}


def test_majority_has_an_overall_too(tasks: list[TextTask], caplog: pytest.LogCaptureFixture) -> None:
    scores = majorities(tasks)
    assert scores["majority_sts_pearson"] == scores["majority_para_f1"] == 0
    expected = (scores["majority_sst_accuracy"] + scores["majority_para_accuracy"]) / 3
    assert scores["majority_overall"] == pytest.approx(expected)
    assert not caplog.records


def test_equal_predictions_are_said(tasks: list[TextTask], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert score_task(tasks[2], torch.full((len(tasks[2].dev),), 2.5)) == {"sts_pearson": 0, "sts_spearman": 0}
    assert "sts: all 32 predictions are equal" in caplog.text


def test_overall_takes_the_main_metrics_of_dev_only() -> None:
    scores = {"sst_accuracy": 0.5, "para_accuracy": 0.8, "para_f1": 0.1, "sts_pearson": 0.2, "sts_spearman": 0.9}
    others = {"validation_sst_accuracy": 1.0, "train_accuracy": 1.0, "nearest_prototype_accuracy": 1.0, "overall": 9.0}
    mixed = scores | others | {f"{MAJORITY}sst_accuracy": 0.3, f"{PROTOTYPE}sts_pearson": 0.4}
    assert main_scores(mixed) == {"sst": 0.5, "para": 0.8, "sts": 0.2}
    assert overall(mixed) == pytest.approx(0.5)
    assert overall(mixed, without="para") == pytest.approx(0.35)
    assert main_scores(mixed, PROTOTYPE) == {"sts": 0.4}
    assert with_overall({"para_accuracy": 0.5}) == {"para_accuracy": 0.5, "overall": 0.5}


def test_the_papers_overall_is_this_mean() -> None:
    for sst, para, sts, printed in ((0.327, 0.648, 0.264, 0.413), (0.490, 0.825, 0.857, 0.724)):
        scores = {"sst_accuracy": sst, "para_accuracy": para, "sts_pearson": sts}
        assert overall(scores) == pytest.approx(printed, abs=6e-4)


def test_what_is_refused(tasks: list[TextTask]) -> None:
    sst, para, sts = tasks
    with pytest.raises(InputError, match=r"sst: 32 dev rows need as many predictions \(N,\); got \(3,\)"):
        score_task(sst, [0, 1, 2])
    with pytest.raises(InputError, match=r"para: prediction 0.5 of row 0 is no class 0..1"):
        score_task(para, torch.full((32,), 0.5))
    with pytest.raises(InputError, match="prediction is NaN"):
        score_task(sts, torch.full((32,), float("nan")))
    with pytest.raises(InputError, match="no task's accuracy"):
        overall({"loss": 0.5})
    with pytest.raises(InputError, match="may not be called 'train_more'"):
        score_task(TextTask("train_more", sst.kind, sst.train, sst.train, sst.dev, classes=sst.classes), [0] * 32)
