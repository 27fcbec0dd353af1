"""Which metrics of runs are drawn where none are named."""

from __future__ import annotations

import json
from pathlib import Path

from metapretrain.report.figures import usual_metrics


def test_accuracies_are_drawn_before_losses_and_other_metrics_only_when_named(tmp_path: Path) -> None:
    names = ("learning_rate", "loss_a", "loss_b", "loss_c", "accuracy", "nearest_prototype_accuracy")
    lines = [{"step": 1, "split": "train", "name": name, "value": 0.5} for name in names]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = ["train/accuracy", "train/nearest_prototype_accuracy", "train/loss_a", "train/loss_b"]
    assert usual_metrics([tmp_path]) == expected


def test_a_text_run_has_a_curve_for_each_task(tmp_path: Path) -> None:
    scores = ("sst_accuracy", "para_accuracy", "para_f1", "sts_pearson", "sts_spearman", "overall", "updates_sst")
    names = [*scores, *(f"nearest_prototype_{name}" for name in scores), "gradient_cosine_sst_sts", "loss_sst"]
    lines = [{"step": 1, "split": "validation", "name": name, "value": 0.5} for name in names]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = {"overall", "sst_accuracy", "para_accuracy", "sts_pearson"}
    assert set(usual_metrics([tmp_path])) == {f"validation/{name}" for name in drawn}


def test_what_was_logged_once_is_no_curve_where_others_are(tmp_path: Path) -> None:
    lines = [{"step": 9, "split": "downstream", "name": "wic_accuracy", "value": 0.5}]
    lines += [{"step": step, "split": "validation", "name": "target_loss", "value": 2.0 - step} for step in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert usual_metrics([tmp_path]) == ["validation/target_loss"]
