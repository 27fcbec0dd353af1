"""Text experiments on the disk: pretrainings shared, equal budgets, the same bits after a resume, predictions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import metapretrain
from benchmarks.run_text import METHODS, PAPER, STRONG
from metapretrain import cli
from metapretrain.data.made import made_tasks
from metapretrain.data.tables import read_texts
from metapretrain.data.texts import TextTask
from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.recipe import Proto
from metapretrain.experiments.saved import SavedTextModel, load_text_model, predict_files
from metapretrain.experiments.text.data import TextData
from metapretrain.experiments.text.experiment import TextExperiment
from metapretrain.experiments.text.recipe import PRETRAININGS, TextMethod, TextPhase, TextRecipe, updates
from metapretrain.models.saved import load as load_image_model
from metapretrain.report import figures
from metapretrain.training import RunFolder, loop
from metapretrain.training.logs import read_metrics
from tests.training.run_files import events

PHASE = TextPhase(lr=3e-3)
RECIPE = TextRecipe(2, PHASE, PHASE, PHASE, PHASE, batch_size=8, encoder="tiny", pool=2)
TASKS = tuple(made_tasks(rows=24))
Make = Callable[..., TextExperiment]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(out: str = "runs", **changes: Any) -> TextExperiment:
        usual = {"recipe": RECIPE, "data": TextData(TASKS), "machine": Machine(), "out": tmp_path / out}
        return TextExperiment("text", "made", "short", **({"figures": None} | usual | changes))

    return build


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(run.rglob("*.safetensors")):
        found |= {f"{file.name}/{name}": value for name, value in load_file(file).items()}
    return found


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_more_batches_than_can_be_sorted_together_are_refused() -> None:
    with pytest.raises(InputError, match="pool is 1000000000; give a whole number from 1 to 10000"):
        replace(RECIPE, pool=1_000_000_000)


@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPE, policy="shortest"), replace(PAPER, batch_size=8), STRONG])
def test_every_trained_row_has_the_same_updates(recipe: TextRecipe) -> None:
    tasks = made_tasks(rows=200)
    tasks[2] = replace(tasks[2], train=tasks[2].train.subset(range(70)))
    totals = {sum(updates(recipe, tasks, method)) for method in METHODS.values() if method.trained}
    batches = (200 if recipe.policy == "longest" else 70) // recipe.batch_size
    assert totals == {recipe.epochs * batches}
    before, after = updates(recipe, tasks, METHODS["proto"])
    assert before == round(recipe.pretrain_share * (before + after)) > 0
    assert updates(recipe, tasks, METHODS["cosine-untrained"]) == (0, 0)


def test_the_methods_of_the_paper() -> None:
    assert {method.pretraining for method in METHODS.values()} == {None, *PRETRAININGS}
    control, proto = PRETRAININGS["cross-entropy"], PRETRAININGS["proto"]
    assert asdict(control) | {"loss": "prototypes"} == asdict(proto)
    assert asdict(METHODS["pretrain-ce"]) | {"pretraining": "proto"} == asdict(METHODS["proto"])
    assert asdict(METHODS["cross"]) | {"pretraining": "proto"} == asdict(METHODS["proto"])
    phases = {PAPER.joint, PAPER.pretrain, PAPER.finetune, PAPER.frozen}
    assert phases == {TextPhase(lr=1e-5, optimizer="adamw", schedule="constant")}
    assert (PAPER.epochs, PAPER.batch_size, PAPER.proto.distance, PAPER.proto.temperature) == (20, 64, "euclidean", 1.0)


def test_rows_that_share_a_pretraining_run_it_once_a_seed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = TextExperiment.pretrain

    def pretrain(self: Any, context: Any) -> Any:
        calls.append(context.name)
        return real(self, context)

    monkeypatch.setattr(TextExperiment, "pretrain", pretrain)
    experiment = make()
    methods = {"proto": METHODS["proto"], "other": replace(METHODS["proto"], surgery=True)}
    results = [experiment.row(name, method, 0) for name, method in methods.items()]
    assert calls == ["pretrain-proto"]
    assert results[0]["budget"] == {
        "encoder_passes": 6 * 24,
        "updates": 6,
        "pretrain_updates": 3,
        "finetune_updates": 3,
    }
    start = load_file(experiment.path("pretrain-proto", 0) / "encoder" / "model.safetensors")
    for name in methods:
        end = load_file(experiment.path(name, 0) / "encoder" / "model.safetensors")
        assert start.keys() == end.keys() and any(not torch.equal(start[key], end[key]) for key in start)
    fresh = experiment.path("fresh", 0)
    assert not fresh.exists()
    experiment.check({"fresh": METHODS["proto"]}, [0])  # the pretraining that is done stands in nobody's way
    with pytest.raises(InputError, match="already holds a run"):
        experiment.check(methods, [0])


def test_a_frozen_encoder_stays_as_it_was_and_its_heads_learn(make: Make) -> None:
    experiment = make()
    result = experiment.row("baseline", METHODS["baseline"], 0)
    untrained = make("other").row("cosine-untrained", METHODS["cosine-untrained"], 0)
    one, other = (
        weights(place.path(name, 0)) for place, name in ((experiment, "baseline"), (make("other"), "cosine-untrained"))
    )
    assert all(torch.equal(one[key], value) for key, value in other.items() if key.startswith("model"))
    assert result["budget"]["encoder_passes"] == 0 and "tokens_per_s" not in result
    metrics, own = result["metrics"], untrained["metrics"]
    assert {"sst_accuracy", "para_f1", "sts_pearson", "overall", "overall_without_para"} <= metrics.keys()
    assert metrics["overall"] == pytest.approx(
        (metrics["sst_accuracy"] + metrics["para_accuracy"] + metrics["sts_pearson"]) / 3
    )
    assert "sts_pearson" in own and not {"sst_accuracy", "para_accuracy", "overall"} & own.keys()
    for name in ("nearest_prototype_overall", "nearest_prototype_sst_accuracy", "majority_para_accuracy"):
        assert own[name] == metrics[name]


@pytest.mark.parametrize(
    ("name", "ordinal"), [("proto-ordinal", True), ("pretrain-ce-ordinal", True), ("proto", False)]
)
def test_prototypes_of_ordered_scores_predict_the_expected_score(make: Make, name: str, ordinal: bool) -> None:
    recipe = replace(RECIPE, proto=Proto("sqeuclidean", 3.0))
    experiment, task = make(recipe=recipe, data=TextData(TASKS)), TASKS[2]
    experiment.row(name, METHODS[name], 0)
    kept = experiment.path(f"pretrain-{METHODS[name].pretraining}", 0)
    for run in (kept, experiment.path(name, 0)):
        encode = load_text_model(run).encoder.encode
        z, *parts = (
            encode(list(zip(rows.first, rows.second, strict=True))).double()
            for rows in (task.train, task.dev, task.validation)
        )
        wanted = []
        for z_part, rows in zip(parts, (task.dev, task.validation), strict=True):
            classes, shares = range(task.num_classes), torch.zeros(len(z), task.num_classes, dtype=torch.float64)
            for place, score in enumerate((task.train.labels - task.low).tolist()):
                for number in classes:
                    shares[place, number] = max(0.0, 1 - abs(score - number)) if ordinal else number == int(score + 0.5)
            there = [number for number in classes if shares[:, number].sum() > 0]
            centres = torch.stack([shares[:, number] @ z / shares[:, number].sum() for number in there])
            far = torch.cdist(z_part, centres).square() / 3
            scores = (-far).softmax(1) @ torch.tensor(there, dtype=torch.float64)
            scores = scores if ordinal else torch.tensor(there)[far.argmin(1)].double()
            wanted.append(torch.corrcoef(torch.stack([scores, rows.labels.double()]))[0, 1].nan_to_num().item())
        metrics = json.loads((run / "result.json").read_text())["metrics"]
        assert metrics["nearest_prototype_sts_pearson"] == pytest.approx(wanted[0], abs=1e-4)
        if run == kept:
            names = ("validation", "nearest_prototype_sts_pearson")
            logged = [line["value"] for line in read_metrics(run) if (line["split"], line["name"]) == names]
            assert logged[-1] == pytest.approx(wanted[1], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("pcgrad", ""),
        ("proto-ensemble", ""),
        ("proto-query", ""),
        ("cross", "utility:updates=2,samples=1"),
        ("proto", "exp3:updates=1"),
    ],
)
def test_a_run_that_was_cut_short_ends_with_the_same_bits(
    make: Make, name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(make, recipe=replace(RECIPE, scheduler=schedule))
    whole = make("whole").row(name, METHODS[name], 1)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    real, seen = loop._Loop._maybe_evaluate, []

    def stop(self: Any) -> None:
        real(self)
        seen.append(self.step)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop._Loop, "_maybe_evaluate", stop)
    with pytest.raises(KeyboardInterrupt):
        make("cut").row(name, METHODS[name], 1)
    again = make("cut", resume=True).row(name, METHODS[name], 1)
    assert again["metrics"] == whole["metrics"] and len(seen) > 3
    runs = [make(out).path(name, 1) for out in ("whole", "cut")]
    ours, theirs = (weights(run) for run in runs)
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert read_metrics(runs[0]) == read_metrics(runs[1])


@pytest.mark.parametrize("name", ["cosine-untrained", "cosine"])
def test_a_row_that_is_killed_before_its_result_logs_everything_once(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("whole").row(name, METHODS[name], 1)
    with monkeypatch.context() as killed:
        killed.setattr(RunFolder, "finish", lambda *_: [][0])
        with pytest.raises(IndexError):
            make("cut").row(name, METHODS[name], 1)
    make("cut", resume=True).row(name, METHODS[name], 1)
    runs = [make(out).path(name, 1) for out in ("whole", "cut")]
    assert read_metrics(runs[0]) == read_metrics(runs[1])
    ours, theirs = (events(run) for run in runs)
    assert any(tag.startswith("when_done/") for tag in theirs.Tags()["scalars"])
    for tag in ours.Tags()["scalars"]:
        assert [(e.step, e.value) for e in ours.Scalars(tag)] == [(e.step, e.value) for e in theirs.Scalars(tag)], tag


def test_predictions_of_a_run_and_of_its_saved_model(make: Make, tmp_path: Path) -> None:
    experiment = make()
    for name in ("cross", "shared", "cosine-untrained"):
        experiment.row(name, METHODS[name], 0)
        run = experiment.path(name, 0)
        files = {}
        for task in TASKS:
            columns = ["id", "sentence"] if task.test.second is None else ["id", "sentence1", "sentence2"]
            values = [task.test.ids, task.test.first, *([task.test.second] if task.test.second else [])]
            files[task.name] = tmp_path / f"{task.name}.csv"
            with files[task.name].open("w", newline="") as stream:
                csv.writer(stream).writerows([columns, *zip(*values, strict=True)])
        predict_files(run, files, tmp_path / "again")
        for task in TASKS:
            if name == "cosine-untrained" and task.name != "sts":
                assert not (run / "predictions" / f"{task.name}.csv").exists()
                continue
            ours, again = (rows_of(place / f"{task.name}.csv") for place in (run / "predictions", tmp_path / "again"))
            assert [row["id"] for row in ours] == task.test.ids
            assert [float(row["prediction"]) for row in ours] == pytest.approx(
                [float(row["prediction"]) for row in again], abs=1e-5
            )
            dev = rows_of(run / "predictions" / f"{task.name}-dev.csv")
            assert [float(row["label"]) for row in dev] == pytest.approx(task.dev.labels.tolist())
    model = metapretrain.load(experiment.path("cross", 0))
    assert isinstance(model, SavedTextModel) and not model.training
    assert model.encode(TASKS[0].dev.first).shape == (len(TASKS[0].dev), 32)
    with pytest.raises(InputError, match="run of texts, not images"):
        load_image_model(experiment.path("cross", 0))
    with pytest.raises(InputError, match="predict takes a TextSet"):
        model.predict("sst", ["a text"])
    for file, other in (("prototypes.safetensors", "shared"), ("encoder/model.safetensors", "shared")):
        mine = (experiment.path("cross", 0) / file).read_bytes()
        (experiment.path("cross", 0) / file).write_bytes((experiment.path(other, 0) / file).read_bytes())
        with pytest.raises(InputError, match=f"{file} is damaged, or of another run"):
            metapretrain.load(experiment.path("cross", 0))
        (experiment.path("cross", 0) / file).write_bytes(mine)
    config = experiment.path("cross", 0) / "config.json"
    whole = config.read_text()
    for old, new in (('"config"', '"confag"'), ('"joined"', '"jained"'), ('"model": {', '"model": 3, "x": {')):
        config.write_text(whole.replace(old, new, 1))
        with pytest.raises(InputError, match=r"config\.json"):
            load_text_model(experiment.path("cross", 0))
    config.write_text(whole)
    ours = (experiment.path("cross", 0) / "predictions/sst.csv").read_bytes()
    (tmp_path / "other.csv").write_text("id,sentence\nmine,a text\n")
    (tmp_path / "columns.csv").write_text("sentence\na text\n")
    with pytest.raises(
        InputError,
        match=r"unknown column 'id'.*a table for sst needs the columns id, sentence; others .* --table id=none",
    ):
        predict_files(experiment.path("cross", 0), {"sst": tmp_path / "columns.csv"})
    with pytest.raises(InputError, match="predictions for other rows"):
        predict_files(experiment.path("cross", 0), {"sst": tmp_path / "other.csv"})
    assert (experiment.path("cross", 0) / "predictions/sst.csv").read_bytes() == ours
    with pytest.raises(InputError, match="sst takes single sentences"):
        model.predict("sst", TASKS[1].dev)
    with pytest.raises(InputError, match="unknown task of the run 'nli'"):
        predict_files(experiment.path("cross", 0), {"nli": tmp_path / "sst.csv"})


def test_choices_are_made_without_the_dev_parts(make: Make) -> None:
    hidden = [replace(task, dev=replace(task.dev, first=["?"] * len(task.dev))) for task in TASKS]
    results = [
        make(out, data=TextData(tuple(tasks), tuning=True)).row("cross", METHODS["cross"], 0)
        for out, tasks in (("one", TASKS), ("two", hidden))
    ]
    assert results[0]["kind"] == "tuning" and results[0]["metrics"] == results[1]["metrics"]
    assert not any("dev" in name or "test" in name for name in results[0]["counts"])
    assert not (make("one").path("cross", 0) / "encoder").exists()


def test_scores_and_conflict_are_logged(make: Make) -> None:
    experiment = make(figures=0)
    experiment.row("proto", METHODS["proto"], 0)
    for name, score in (("pretrain-proto", "nearest_prototype_overall"), ("proto", "overall")):
        logged = {line["name"] for line in read_metrics(experiment.path(name, 0)) if line["split"] == "validation"}
        assert {score, "gradient_cosine_sst_para", "gradient_cosine_para_sts"} <= logged
    run = experiment.path("pretrain-proto", 0)
    assert {file.name for file in (run / "figures").iterdir()} == {f"tsne-{task.name}.png" for task in TASKS}
    for when in ("before", "after"):  # TensorBoard's projector has the same rows
        (table,) = (run / "projector").glob(f"sst-{when}-pretraining-*/metadata.tsv")
        assert len(table.read_text().splitlines()) == len(TASKS[0].dev)
    result = json.loads((run / "result.json").read_text())
    assert result["tokens_per_s"] >= 0 and 0 < result["padding_share"] < 1 and result["encoder"] == "tiny"


def test_maps_of_100_rows_are_drawn_by_the_chosen_reducer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], figures.tsne_figure

    def drawn(panels: Any, names: Any, *, reducer: str, max_points: int) -> Any:
        seen.append((reducer, max_points))
        return real(panels, names, max_points=max_points)

    monkeypatch.setattr(figures, "tsne_figure", drawn)
    experiment = make(figures=0, reducer="umap")
    experiment.run([experiment.context("pretrain-proto", PRETRAININGS["proto"], 0, shared=True)])
    assert seen == [("umap", 100)] * 3
    names = {file.name for file in (experiment.path("pretrain-proto", 0) / "figures").iterdir()}
    assert names == {f"umap-{task.name}.png" for task in TASKS}


@pytest.mark.parametrize("method", [TextMethod(pretraining="proto"), TextMethod(surgery=True)])
def test_a_compiled_encoder_gives_the_same(make: Make, monkeypatch: pytest.MonkeyPatch, method: TextMethod) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    recipe = replace(RECIPE, dropout=0.0)
    plain, compiled = (
        make(name, recipe=recipe, machine=Machine(compile=name == "compiled")).row("row", method, 0)["metrics"]
        for name in ("plain", "compiled")
    )
    assert compiled == pytest.approx(plain, rel=1e-3, abs=1e-3)


def test_tasks_that_cannot_be_trained_are_refused_before(make: Make) -> None:
    with pytest.raises(InputError, match="batch_size 32 is more than the 24 training rows of sst"):
        make(recipe=replace(RECIPE, batch_size=32)).check({"cross": METHODS["cross"]}, [0])
    with pytest.raises(InputError, match="unknown task"):
        make(recipe=replace(RECIPE, loss_weights="nli=1")).check({"cross": METHODS["cross"]}, [0])
    with pytest.raises(InputError, match="too few"):
        make(recipe=replace(RECIPE, batch_size=24, epochs=1)).check({"proto": METHODS["proto"]}, [0])
    with pytest.raises(InputError, match="given twice"):
        TextData((TASKS[0], TASKS[0]))
    empty = replace(TASKS[0], validation=TASKS[0].validation.subset([]))
    with pytest.raises(InputError, match="no validation rows"):
        TextData((empty,), tuning=True)


def test_a_single_task_without_validation_rows(make: Make) -> None:
    task = replace(TASKS[0], validation=TASKS[0].validation.subset([]), test=None)
    result = make(data=TextData((task,))).row("unfrozen", TextMethod(), 0)
    assert result["metrics"]["overall"] == result["metrics"]["sst_accuracy"]


def test_single_sentences_with_scores_are_trained_saved_and_predicted(make: Make, tmp_path: Path) -> None:
    words = {"dreadful": 0.0, "dull": 1.25, "plain": 2.5, "good": 3.75, "superb": 5.0}
    lines = [
        f"{n},the {thing} is {word},{score}" for n, (word, score) in enumerate(words.items()) for thing in "abcdef"
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["id,sentence,stars", *lines]) + "\n")
    score: dict[str, Any] = {"kind": "regression", "low": 0.0, "high": 5.0}
    rows = read_texts(tmp_path / "rows.csv", text="sentence", id="id", label="stars", **score)
    task = TextTask("stars", train=rows, validation=rows.subset([]), dev=rows, **score)
    recipe = replace(RECIPE, epochs=12)
    for name, method in {"cross": TextMethod(joined=True), "proto": METHODS["proto"], "cosine": TextMethod()}.items():
        experiment = make(recipe=recipe, data=TextData((task,)))
        metrics = experiment.row(name, method, 0)["metrics"]
        assert metrics["overall"] == metrics["stars_pearson"] > 0.5 and metrics["majority_stars_pearson"] == 0
        (file,) = predict_files(experiment.path(name, 0), {"stars": tmp_path / "rows.csv"}, tmp_path / name)
        predicted = torch.tensor([float(row["prediction"]) for row in rows_of(file)])
        assert torch.corrcoef(torch.stack([predicted, rows.require_labels()]))[0, 1] > 0.5
    with pytest.raises(InputError, match="pairs of sentences, which regression cannot use"):
        replace(task, dev=replace(rows, second=rows.first))


def test_tables_to_predict_are_read_as_the_caller_says(make: Make, tmp_path: Path) -> None:
    experiment = make(data=TextData((TASKS[0],)))
    experiment.row("cross", METHODS["cross"], 0)
    run, mine = experiment.path("cross", 0), tmp_path / "mine.csv"
    mine.write_text('review|nr\n"an open quote|7\n |8\n')
    with pytest.raises(
        InputError,
        match=r"unknown column 'text'; .* a table for sst needs the columns nr, text; others .* --table text=COLUMN",
    ):
        predict_files(run, {"sst": mine}, tmp_path / "out", table={"id": "nr", "text": "text"})
    table = {"id": "nr", "text": "review"}
    with pytest.raises(InputError, match=r"a quote was left open .*; pass in table: quotes=False"):
        predict_files(run, {"sst": mine}, tmp_path / "out", table=table)
    given = ["--table", "id=nr", "--table", "text=review", "--out", str(tmp_path / "out")]
    command = ["predict", str(run), "--sst", str(mine), *given, "--device", "cpu"]
    with pytest.raises(InputError, match="; give --table quotes=False"):
        cli.build_parser().parse_args(command).command(cli.build_parser().parse_args(command))
    command += ["--table", "quotes=False"]
    with pytest.raises(InputError, match=r"line 3: review is empty; give --table unusable='skip' to leave"):
        cli.build_parser().parse_args(command).command(cli.build_parser().parse_args(command))
    assert cli.main([*command, "--table", "unusable=skip"]) == 0
    assert [row["id"] for row in rows_of(tmp_path / "out" / "sst.csv")] == ["7"]
