"""A prompts experiment on the disk: shared pretrainings and draws, resumes, saved prompts, trials."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from prompts_experiment import PromptExperiment

from benchmarks.run_prompts import METHODS, TRIAL
from metapretrain.data.made import made_sentiment
from metapretrain.data.texts import SentenceData, TextSet
from metapretrain.errors import InputError
from metapretrain.evaluation.predictions import read_predictions
from metapretrain.experiments.base import Machine
from metapretrain.experiments.prompts.data import PromptData
from metapretrain.experiments.saved import predict_files
from metapretrain.models.language_models import load_language_model
from metapretrain.prompts import PromptedModel, PromptTemplate, SoftPrompt, Verbalizer
from metapretrain.prompts.fused import FusedLayers

SETS = ("sst2", "semeval-laptop", "rte")
ROWS = ("pt", "ppt", "metapt-kmeans")


@cache
def made() -> dict[str, SentenceData]:
    return made_sentiment()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def experiment(out: Path, *, resume: bool = False, tuning: bool = False, **options: Any) -> PromptExperiment:
    data = PromptData.of(made()["yelp5"], [made()[name] for name in SETS], TRIAL, tuning)
    return PromptExperiment("prompts", "made", "trial", TRIAL, data, Machine(), out, None, resume, **options)


def run(out: Path, names: Sequence[str] = ROWS, seeds: Sequence[int] = (0,), **options: Any) -> dict[Any, Any]:
    rows = {name: METHODS[name] for name in names}
    results = experiment(out, **options).rows(rows, seeds)
    return {(result["method"], result["seed"]): result for result in results}


def test_rows_do_not_depend_on_what_runs_beside_them(tmp_path: Path) -> None:
    together = run(tmp_path / "together", seeds=(0, 3))
    for seed in (0, 3):
        for name in ROWS:
            alone = run(tmp_path / "alone", [name], [seed])[name, seed]
            assert alone["metrics"] == together[name, seed]["metrics"]
            assert alone["budget"] == together[name, seed]["budget"]
    assert together["pt", 0]["metrics"] != together["pt", 3]["metrics"]
    assert together["ppt", 0]["budget"]["pretrain_reads"] == together["metapt-kmeans", 0]["budget"]["pretrain_reads"]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_compiled_layers_pretrain_as_plain_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, close: float
) -> None:
    """In runs that take each other's place; rows are padded to one width, so that there is one form."""
    compiled_layers, found = [], []

    def traced(model: Any) -> FusedLayers:
        compiled_layers.append(FusedLayers(model, backend="eager"))
        return compiled_layers[-1]

    monkeypatch.setattr("metapretrain.prompts.model.FusedLayers", traced)
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        one = replace(experiment(out), machine=Machine(precision=precision, compile=compiled))
        list(one.rows({"metapt-kmeans": METHODS["metapt-kmeans"]}, [0]))
        folder = out / "prompts/made-trial/pretrain-metapt-kmeans-s0"
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((folder / "config.json").read_text())["config"]
        found.append((config, [row for row in logged if row["name"] in ("query_loss_after", "inner_gradient_norm")]))
    (layers,) = compiled_layers
    assert layers.possible and len(layers.pieces) == 1
    assert found[0][0] == found[1][0] and len(found[0][1]) >= 2
    for row, other in zip(found[0][1], found[1][1], strict=True):
        assert other["name"] == row["name"] and other["value"] == pytest.approx(row["value"], rel=close)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metapt-kmeans", "multitask", "ppt"])
def test_stacks_of_prompts_are_pretrained_by_compiled_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the prompts that plain layers give; validation, whose passes are of other forms, compiles none."""
    layers, found = [], []

    def traced(model: Any) -> FusedLayers:
        layers.append(FusedLayers(model, backend="eager"))
        return layers[-1]

    monkeypatch.setattr("metapretrain.prompts.model.FusedLayers", traced)
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        one = replace(experiment(out), machine=Machine(compile=compiled), recipe=replace(TRIAL, budget="fair"))
        list(one.rows({name: METHODS[name]}, [0, 1]))
        folders = [out / f"prompts/made-trial/pretrain-{METHODS[name].pretraining}-s{seed}" for seed in (0, 1)]
        found.append([SoftPrompt.from_adapter(folder / "prompt").weight.detach() for folder in folders])
    assert layers[-1].possible and len(layers[-1].pieces) == 1
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-4)


def test_a_table_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole")
    cut = experiment(tmp_path / "cut")
    iterator = iter(cut.rows({name: METHODS[name] for name in ROWS}, [0]))
    assert [next(iterator)["method"] for _ in range(2)] == ["pt", "ppt"]
    del iterator
    pretrained = [
        tmp_path / "cut/prompts/made-trial" / name / "result.json" for name in ("pt-s0", "ppt-s0", "pretrain-ppt-s0")
    ]
    assert not (tmp_path / "cut/prompts/made-trial/pretrain-metapt-kmeans-s0").exists()
    before = [file.stat().st_mtime_ns for file in pretrained]
    again = run(tmp_path / "cut", resume=True)
    assert [file.stat().st_mtime_ns for file in pretrained] == before
    assert {key: result["metrics"] for key, result in again.items()} == {
        key: result["metrics"] for key, result in whole.items()
    }


def test_finished_runs_are_refused_without_resume(tmp_path: Path) -> None:
    run(tmp_path, ["pt"])
    with pytest.raises(InputError, match="already holds a run"):
        experiment(tmp_path).check({"pt": METHODS["pt"]}, [0])
    experiment(tmp_path, resume=True).check({"pt": METHODS["pt"]}, [0])


def test_a_saved_prompt_predicts_what_the_run_did(tmp_path: Path) -> None:
    run(tmp_path, ["ppt"])
    folder = tmp_path / "prompts/made-trial/ppt-s0"
    for name in SETS:
        model, tokenizer = load_language_model("tiny")
        saved = PromptedModel.load(folder / "prompts" / name, model, tokenizer)
        prompt = SoftPrompt.from_adapter(folder / "prompts" / name)()
        test = experiment(tmp_path).data.sets[SETS.index(name)].test
        written = read_predictions(folder / "predictions" / f"{name}.csv")
        predicted = saved.classify(prompt, test.first, test.second).argmax(1)
        assert predicted.tolist() == written.predictions.tolist()
        accuracy = json.loads((folder / "result.json").read_text())["metrics"][f"{name}_accuracy"]
        assert accuracy == written.correct.mean()
        if name == "sst2":
            mine = tmp_path / "mine.csv"
            mine.write_text("id,sentence\n" + "".join(f"{row},{text}\n" for row, text in enumerate(test.first)))
            (file,) = predict_files(folder, {"sst2": mine})
            lines = file.read_text().splitlines()
            assert lines == ["id,prediction", *(f"{row},{y}" for row, y in enumerate(written.predictions.tolist()))]
    with pytest.raises(InputError, match="unknown set of the run 'sst5'"):
        predict_files(folder, {"sst5": mine})
    weights = [folder / "prompts" / name / "adapter_model.safetensors" for name in ("sst2", "semeval-laptop")]
    weights[0].write_bytes(weights[1].read_bytes())
    with pytest.raises(InputError, match=r"sst2/adapter_model\.safetensors is damaged, or of another run"):
        predict_files(folder, {"sst2": mine})


def test_a_prompt_alone_predicts_with_the_model_that_is_named(tmp_path: Path) -> None:
    net, tokenizer = load_language_model("tiny")
    model = PromptedModel(net, PromptTemplate("It was <X>."), Verbalizer(["bad", "good"], tokenizer))
    prompt = torch.rand(3, 32)
    model.save(tmp_path / "prompt", prompt)
    texts = ["a good plot", "bad", "so so"]
    mine = tmp_path / "mine.csv"
    mine.write_text("id,sentence\n" + "".join(f"{row},{text}\n" for row, text in enumerate(texts)))
    with pytest.raises(InputError, match=r"adapter_config\.json names no language model .* name it \(--model\)"):
        predict_files(tmp_path / "prompt", {"any": mine})
    (file,) = predict_files(tmp_path / "prompt", {"any": mine}, model="tiny")
    expected = model.classify(prompt, texts).argmax(1).tolist()
    assert file.read_text().splitlines() == ["id,prediction", *(f"{row},{y}" for row, y in enumerate(expected))]


def test_zero_shot_and_majority(tmp_path: Path) -> None:
    metrics = run(tmp_path, ["zero-shot"])["zero-shot", 0]["metrics"]
    model = experiment(tmp_path).inputs.of_set(made()["sst2"])
    test = experiment(tmp_path).data.sets[0].test
    predicted = model.classify(torch.zeros(0, 32), test.first).argmax(1)
    labels = test.require_labels()
    assert metrics["sst2_accuracy"] == float(predicted.eq(labels).double().mean())
    given = made()["sst2"].train.require_labels().tolist()
    most = max(sorted(set(given)), key=given.count)
    assert metrics["majority_sst2_accuracy"] == float(labels.eq(most).double().mean())
    values = [metrics[f"{name}_f1"] for name in SETS]
    assert metrics["mean_f1"] == pytest.approx(sum(values) / 3)


def test_a_row_without_a_prompt_says_what_predicts(tmp_path: Path) -> None:
    run(tmp_path, ["zero-shot"])
    with pytest.raises(InputError, match=r"one of run_prompts\.py that tuned a prompt"):
        predict_files(tmp_path / "prompts/made-trial/zero-shot-s0", {"sst2": tmp_path / "mine.csv"})


def test_a_trial_leaves_the_test_parts_alone(tmp_path: Path) -> None:
    trial = experiment(tmp_path, tuning=True)
    for one in trial.data.sets:
        object.__setattr__(one, "test", replace(one.test, labels=None))  # whoever reads these labels gets an error
    result = next(iter(trial.rows({name: METHODS[name] for name in ("pt", "ft")}, [0])))
    assert result["kind"] == "tuning"
    assert {name for name in result["metrics"] if not name.startswith("validation_")} == set()
    assert 0 <= result["metrics"]["validation_mean_accuracy"] <= 1
    assert not (tmp_path / "prompts/made-trial/pt-s0/predictions").exists()


def test_sentences_of_the_pretraining_data_are_dropped_and_counted() -> None:
    yelp, sst = made()["yelp5"], made()["sst2"]
    shared = TextSet(
        [*sst.train.first, yelp.train.first[0].upper()],
        labels=torch.cat([sst.train.labels, torch.tensor([1])]),  # type: ignore[list-item]
    )
    data = PromptData.of(yelp, [replace(sst, train=shared)], TRIAL)
    assert data.counts["sst2_train_in_pretraining"] == 1 and data.counts["sst2_train"] == len(sst.train)
    assert data.counts["pretraining"] == TRIAL.rows
    for bad in ([], [sst, sst]):
        with pytest.raises(InputError, match="give downstream sets, each once"):
            PromptData.of(yelp, bad, TRIAL)
    with pytest.raises(InputError, match="but there are 100 rows"):
        PromptData.of(yelp, [sst], replace(TRIAL, examples=91))


def test_a_resume_does_not_take_a_trial_for_a_row(tmp_path: Path) -> None:
    rows = {"pt": METHODS["pt"]}
    for tuning in (True, False):
        out = tmp_path / str(tuning)
        run(out, ["pt"], tuning=tuning)
        experiment(out, resume=True, tuning=tuning).check(rows, [0])
        with pytest.raises(InputError, match=f"pt-s0 was run {'with' if tuning else 'without'} --validate, this call"):
            experiment(out, resume=True, tuning=not tuning).check(rows, [0])
