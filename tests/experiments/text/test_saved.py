"""A saved pretraining predicts by its prototypes: of added embeddings, and scores from the range's lowest on."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import metapretrain
from metapretrain.cli import main
from metapretrain.data.made import made_tasks
from metapretrain.data.texts import TextSet, TextTask
from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import score_task
from metapretrain.evaluation.predictions import table_scores
from metapretrain.experiments.base import Machine
from metapretrain.experiments.recipe import Proto
from metapretrain.experiments.saved import load_text_model, predict_files, read_classes
from metapretrain.experiments.text.data import TextData
from metapretrain.experiments.text.experiment import TextExperiment
from metapretrain.experiments.text.recipe import PRETRAININGS, TextMethod, TextPhase, TextRecipe

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


@pytest.mark.parametrize("name", ["proto-ordinal", "cross-entropy-ordinal"])
@pytest.mark.parametrize("low", [0, 1])
def test_an_ordinal_pretraining_predicts_the_scores_that_its_result_is_of(tmp_path: Path, name: str, low: int) -> None:
    *others, sts = made_tasks(rows=24)
    splits = {split: getattr(sts, split) for split in ("train", "validation", "dev")}
    moved = {split: replace(rows, labels=rows.labels + low) for split, rows in splits.items()}
    sts = replace(sts, **moved, low=float(low), high=5.0 + low)
    recipe = replace(RECIPE, proto=Proto(distance="sqeuclidean", temperature=3.0))
    data = TextData((*others, sts))
    experiment = TextExperiment("text", "made", "short", recipe, data, Machine(), tmp_path, figures=None)
    experiment.run([experiment.context(f"pretrain-{name}", PRETRAININGS[name], 0, shared=True)])
    run = experiment.path(f"pretrain-{name}", 0)
    model = metapretrain.load(run)
    found = model.predict("sts", sts.dev)  # type: ignore[call-arg, arg-type]
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    for metric, value in score_task(sts, found, prefix="nearest_prototype_").items():
        assert value == pytest.approx(metrics[metric], abs=1e-6)
    assert not torch.equal(found, found.round())  # between the classes
    assert bool((found >= low).all()) and bool((found <= 5 + low).all())
    (written,) = predict_files(
        run, {"sts": table(tmp_path, "sts", sts.dev)}, tmp_path, table={"id": None, "separator": "\t"}
    )
    with written.open(newline="", encoding="utf-8") as file:
        rows = [float(row["prediction"]) for row in csv.DictReader(file)]
    torch.testing.assert_close(torch.tensor(rows), found, atol=1e-4, rtol=0)
    nearest = model.predict("sst", others[0].dev)  # type: ignore[call-arg, arg-type]
    assert nearest.dtype == torch.int64


def test_a_class_without_training_rows_is_never_predicted(tmp_path: Path) -> None:
    *_, sts = made_tasks(rows=24)
    train = sts.train.subset([row for row, label in enumerate(sts.train.require_labels().tolist()) if label < 1.5])
    task = replace(sts, train=train, validation=train)
    data = TextData((task,))
    experiment = TextExperiment("text", "made", "short", RECIPE, data, Machine(), tmp_path, figures=None)
    experiment.run([experiment.context("pretrain-proto", PRETRAININGS["proto"], 0, shared=True)])
    model = load_text_model(experiment.path("pretrain-proto", 0))
    with torch.no_grad():  # embeddings at 0, where a centre of no row would be the nearest
        for parameter in model.encoder.parameters():
            parameter.zero_()
    assert set(model.predict("sts", task.dev).tolist()) <= {0.0, 1.0}


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
    alike = tmp_path / "alike.csv"
    alike.write_text("sentence,label\na,1\nb,1.0\nc,2\n")
    for wrong, said in (
        ([*common, "--texts", str(alike)], "column 'label': '1' and '1.0' are two classes, but one number; write them"),
        ([*common, "--image-folder", str(tmp_path)], "is a run of texts: give --texts FILE"),
        (
            [*common, "--texts", str(table), "--table", "text=headline"],
            "'label'; the table has headline, topic; --table",
        ),
        ([*common, "--texts", str(table), "--label", "topic"], "; the table has headline, topic; --table text=COLUMN"),
        (
            [*common, *texts, "--table", "label=topic"],
            "--table label=topic: the classes' column is given by --label alone",
        ),
        ([*common, *texts[:-1], "text=topic"], "--table text=topic: the classes' column is given by --label alone"),
    ):
        assert main(wrong) == 2
        assert said in (shown := capsys.readouterr().err) and "Traceback" not in shown


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained row with a head for each task."""
    out = tmp_path_factory.mktemp("runs")
    data = TextData(tuple(made_tasks(rows=24)))
    experiment = TextExperiment("text", "made", "short", RECIPE, data, Machine(), out, figures=None)
    experiment.run([experiment.context("shared", TextMethod(shared=True), 0)])
    return experiment.path("shared", 0)


def table(path: Path, task: str, rows: TextSet) -> Path:
    """The rows of a task with their labels in a column `truth`."""
    columns = ["sentence"] if rows.second is None else ["sentence1", "sentence2"]
    texts = zip(*[column for column in (rows.first, rows.second) if column is not None], strict=True)
    lines = [[*row, label] for row, label in zip(texts, rows.require_labels().tolist(), strict=True)]
    with (path / f"{task}.tsv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([[*columns, "truth"], *lines])
    return path / f"{task}.tsv"


def test_probabilities_scores_and_temperature_of_labelled_tables(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_text_model(run)
    tasks = {task.name: task for task in made_tasks(rows=24)}
    files = {name: table(tmp_path, name, task.dev) for name, task in tasks.items()}
    how = {"label": "truth", "id": None}
    plain = predict_files(run, files, tmp_path / "plain", table=how, held={})
    warm = predict_files(run, files, tmp_path / "warm", table=how, held={"sst": files["sst"]})
    for name, before, after in zip(tasks, plain, warm, strict=True):
        task, logits = tasks[name], model.logits(name, tasks[name].dev)
        rows = [list(csv.DictReader(path.open(encoding="utf-8"))) for path in (before, after)]
        assert [float(row["label"]) for row in rows[0]] == task.dev.require_labels().tolist()
        assert torch.equal(model.predict(name, task.dev), logits.argmax(1) if logits.ndim > 1 else logits)
        if task.regression:
            assert rows[0] == rows[1] and logits.ndim == 1 and list(rows[0][0]) == ["id", "prediction", "label"]
            continue
        p = torch.tensor([[float(row[f"p_{one}"]) for one in task.classes] for row in rows[0]])
        torch.testing.assert_close(p, logits.softmax(1), atol=1e-6, rtol=0)
        assert [int(row["prediction"]) for row in rows[0]] == logits.argmax(1).tolist()
        assert (rows[0] == rows[1]) == (name != "sst")
        expected = {"accuracy": (logits.argmax(1) == task.dev.require_labels()).double().mean().item()}
        assert table_scores(before)["accuracy"] == pytest.approx(expected["accuracy"])
    assert table_scores(warm[0])["calibration error"] < table_scores(plain[0])["calibration error"] + 0.05

    options = ["--out", str(tmp_path / "cli"), "--table", "label=truth", "--table", "id=none", "--device", "cpu"]
    assert main(["predict", str(run), "--sst", str(files["sst"]), "--probabilities", *options]) == 0
    told = capsys.readouterr().out.strip()
    scores = ", ".join(f"{name} {value:.4f}" for name, value in table_scores(plain[0]).items())
    assert told == f"{tmp_path / 'cli' / 'sst.csv'}\t{scores}" and "calibration error" in told
    with pytest.raises(InputError, match="unknown task that is predicted 'para'; allowed: sst"):
        predict_files(run, {"sst": files["sst"]}, tmp_path / "no", held={"para": files["para"]})


def test_a_run_with_scores_by_the_cosine_predicts_what_it_scored(tmp_path: Path) -> None:
    experiment = TextExperiment(
        "text", "made", "short", RECIPE, TextData(tuple(made_tasks(rows=24))), Machine(), tmp_path, figures=None
    )
    method = TextMethod("proto-cosine", joined=True, sts="cosine")
    result = experiment.row("proto-cosine", method, 0)
    model = load_text_model(experiment.path("proto-cosine", 0))
    assert model.joined == {"sst": True, "para": True, "sts": False}
    for task in experiment.data.tasks:
        expected = score_task(task, model.predict(task.name, task.dev))
        assert {name: result["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-6)
