"""A saved pretraining predicts by its prototypes: of added embeddings, and scores from the range's lowest on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import metapretrain
from metapretrain.cli import main
from metapretrain.data.made import made_tasks
from metapretrain.data.texts import TextSet, TextTask
from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.saved import load_text_model, read_classes
from metapretrain.experiments.text.data import TextData
from metapretrain.experiments.text.experiment import TextExperiment
from metapretrain.experiments.text.recipe import PRETRAININGS, TextPhase, TextRecipe

PHASE = TextPhase(lr=3e-3)
RECIPE = TextRecipe(2, PHASE, PHASE, PHASE, PHASE, batch_size=8, encoder="tiny")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[TextTask, ...], Path]:
    """Tasks with scores of 1 to 6, and a finished pretraining on them."""

    def raised(rows: TextSet) -> TextSet:
        return rows if rows.labels is None else replace(rows, labels=rows.labels + 1)

    folder = tmp_path_factory.mktemp("runs")
    *others, sts = made_tasks(rows=24)
    splits = {split: raised(getattr(sts, split)) for split in ("train", "validation", "dev")}
    tasks = (*others, replace(sts, **splits, low=1.0, high=6.0))  # type: ignore[arg-type]
    experiment = TextExperiment("text", "made", "short", RECIPE, TextData(tasks), Machine(), folder, figures=None)
    plan = PRETRAININGS["proto-separate"]
    experiment.run([experiment.context("pretrain-proto-separate", plan, 0, shared=True)])
    return tasks, experiment.path("pretrain-proto-separate", 0)


def test_a_pretraining_predicts_the_class_or_the_score_of_the_nearest_prototype(
    saved: tuple[tuple[TextTask, ...], Path],
) -> None:
    tasks, run = saved
    model = load_text_model(run)
    for task in tasks:
        z, z_dev = (
            sum(model.encode(column) for column in (rows.first, rows.second) if column is not None)
            for rows in (task.train, task.dev)
        )
        assert isinstance(z, torch.Tensor) and isinstance(z_dev, torch.Tensor)
        classes = task.class_labels(task.train)
        centres = torch.stack([z[classes == label].mean(0) for label in range(task.num_classes)])
        nearest = torch.cdist(z_dev, centres).argmin(1)
        wanted = nearest + 1.0 if task.name == "sts" else nearest
        assert torch.equal(model.predict(task.name, task.dev), wanted)


def test_new_classes_of_texts_come_by_a_few_of_each(saved: tuple[tuple[TextTask, ...], Path]) -> None:
    model = metapretrain.load(saved[1])
    support, labels = ["a good film", "good", "a bad film", "bad"], [7, 7, 3, 3]
    classifier = model.adapt(support, torch.tensor(labels))  # type: ignore[union-attr, arg-type]
    queries = ["one film", "two films", "good"]
    z, support_z = model.encode(queries), model.encode(support)  # type: ignore[arg-type]
    centres = torch.stack([support_z[2:].mean(0), support_z[:2].mean(0)])
    expected = -(z[:, None] - centres).square().sum(-1)
    torch.testing.assert_close(classifier.logits(queries), expected)
    assert classifier.classes.tolist() == [3, 7]
    assert classifier.predict(queries).tolist() == [(3, 7)[row] for row in expected.argmax(1).tolist()]
    torch.testing.assert_close(classifier.probabilities(queries), expected.softmax(1))
    pairs = model.adapt([("a", "b"), ("c", "d")], [0, 1])  # type: ignore[union-attr, arg-type]
    assert pairs.predict([("a", "b")]).tolist() == [0]
    for wrong, said in (([0, 1], "got 4 support rows and 2 labels"), ([0.5] * 4, "labels must be a tensor or list")):
        with pytest.raises(InputError, match=said):
            model.adapt(support, wrong)  # type: ignore[union-attr, arg-type]


def test_the_command_tells_the_accuracy_on_a_table_of_texts(
    saved: tuple[tuple[TextTask, ...], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = tmp_path / "news.csv"
    lines = [f"{word} number {row},{word}" for row in range(12) for word in ("sport", "money", "music")]
    table.write_text("\n".join(["headline,topic", *lines, "nothing,"]) + "\n")
    common = ["few-shot", str(saved[1]), "--ways", "3", "--shots", "1", "5", "--queries", "5", "--episodes", "20"]
    texts = ["--texts", str(table), "--label", "topic", "--table", "text=headline"]
    assert main([*common, *texts]) == 0
    told = capsys.readouterr()
    found = [float(line.split()[2].rstrip("%")) for line in told.out.splitlines()]
    assert len(found) == 2 and found[1] > 90 and "1 rows name no class" in caplog.text
    rows = read_classes(table, "topic", {"text": "headline"})
    assert rows.classes == ("money", "music", "sport") and rows.labels is not None
    assert [rows.classes[label] for label in rows.labels.tolist()[:3]] == ["sport", "money", "music"]
    for wrong, said in (
        ([*common, "--image-folder", str(tmp_path)], "is a run of texts: give --texts FILE"),
        ([*common, "--texts", str(table), "--table", "text=headline"], "label"),
        ([*common, "--texts", str(table), "--label", "topic"], "sentence"),
    ):
        assert main(wrong) == 2
        assert said in (shown := capsys.readouterr().err) and "Traceback" not in shown
