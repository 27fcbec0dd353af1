"""Recipe fair: MAML, Reptile and joint training of prompts in one stack, by the same passes, start and rows."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prompts_pretraining import MetaTasks
from torch import Tensor

from benchmarks.run_prompts import ROWS, TRIAL, main, options_of, recipe_of
from metapretrain.data.made import made_sentiment
from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.prompts.data import ALL_WORDS, Pool, PromptData, PromptInputs, encode_rows, fewer_labels
from metapretrain.experiments.prompts.recipe import Fair, Meta, PromptMethod, PromptRecipe, Tuning, passes_per_step
from metapretrain.experiments.prompts.tuning import Job, Stack
from metapretrain.models.language_models import load_language_model
from metapretrain.prompts import PromptBatch, PromptedModel, PromptMAML, PromptTemplate, SoftPrompt, Verbalizer

TUNING = Tuning(lr=0.1, patience=None, warmup=2, weight_decay=0.0)
WORDS = tuple(range(5))


@cache
def model() -> PromptedModel:
    net, tokenizer = load_language_model("tiny")
    return PromptedModel(net.double(), PromptTemplate("It was <X>."), Verbalizer(ALL_WORDS, tokenizer), max_length=40)


@cache
def pool() -> Pool:
    return Pool.of(encode_rows(model(), "It was <X>.", made_sentiment()["yelp5"].train, WORDS), "cpu")


def meta_rows(seed: int, shots: int = 2) -> MetaTasks:
    return MetaTasks(torch.arange(len(pool())) % 3, shots=shots, held_out=2, seed=seed)


def job(seed: int, plan: Callable[[int], Tensor]) -> Job:
    rows, prompt = meta_rows(seed), SoftPrompt.random(3, 32, seed=seed).weight.detach().double()
    return Job(str(seed), prompt, rows.training, torch.stack(rows.held_out).flatten(), WORDS, seed, plan)


def two_tasks(rows: MetaTasks, step: int) -> Tensor:
    return torch.cat([rows.of(0, step), rows.of(1, step)])


def turns_of(rows: MetaTasks, updates: int, step: int) -> Tensor:
    return rows.in_turn(*divmod(step, updates), of=updates)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_gradient_and_what_is_validated_are_those_of_prompt_maml(
    order: int, steps: int, clip: float | None
) -> None:
    meta = Meta(shots=2, inner_lr=0.5, inner_steps=steps, order=order, inner_clip=clip)
    plans = [partial(two_tasks, meta_rows(seed)) for seed in (0, 1)]
    jobs = [job(seed, plans[seed]) for seed in (0, 1)]
    stack = Stack(model(), pool(), jobs, TUNING, steps=1, meta=meta)
    stack._advance(stack.jobs, 1)
    accuracies = stack._judged(jobs)[:, 0]
    for one, plan, accuracy in zip(jobs, plans, accuracies, strict=True):
        own = model()
        options: dict[str, Any] = {"inner_lr": 0.5, "inner_steps": steps, "order": order, "inner_clip": clip}
        maml = PromptMAML(own.model, SoftPrompt(one.prompt), own.template, own.verbalizer, **options, reduction="mean")
        rows = plan(0).reshape(2, 4)
        maml.backward(pool().gather(rows[:, :2]), pool().gather(rows[:, 2:]))
        torch.testing.assert_close(stack.progress[one.name].prompt.grad, maml.prompt.weight.grad)
        tasks = one.validation.reshape(-1, 4)
        after = PromptMAML(
            own.model, SoftPrompt(stack.progress[one.name].prompt), own.template, own.verbalizer, **options
        )
        halves = pool().gather(tasks[:, :2]), pool().gather(tasks[:, 2:])
        right = [right_after(after, *pair) for pair in (halves, halves[::-1])]
        assert float(accuracy) == pytest.approx(float(torch.cat(right).double().mean()))


def right_after(maml: PromptMAML, support: PromptBatch, query: PromptBatch) -> Tensor:
    scores = maml.prompted(maml.adapted(support), query)[..., list(WORDS)]
    return scores.argmax(-1) == query.labels


def test_reptile_is_the_loop_over_tasks() -> None:
    reptile, plan = Fair(updates=3, rate=0.5), partial(turns_of, meta_rows(0), 3)
    found = Stack(model(), pool(), [job(0, plan)], TUNING, steps=9, every=3, reptile=reptile).run()["0"]
    start = job(0, plan).prompt.clone()
    for turn in range(3):
        fast = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([fast], lr=TUNING.lr, weight_decay=0.0)
        for step in range(3):
            optimizer.zero_grad()
            model().losses(fast, pool().gather(plan(3 * turn + step))).mean().backward()
            optimizer.step()
        start.lerp_(fast.detach(), 0.5 * (1 - 3 * turn / 9))
    torch.testing.assert_close(found.prompt.detach(), start)
    assert [step for step, _ in found.history] == [0, 3, 6, 9]


@pytest.mark.parametrize("more", [{"reptile": Fair(updates=2)}, {"meta": Meta(shots=2, inner_lr=0.5)}])
def test_seeds_side_by_side_and_a_run_that_goes_on_end_as_one_alone(more: dict[str, Any]) -> None:
    plans = [partial(turns_of, meta_rows(seed), 2) for seed in (0, 1)]
    options: dict[str, Any] = {"steps": 8, "every": 4, **more}
    together = Stack(model(), pool(), [job(seed, plans[seed]) for seed in (0, 1)], TUNING, **options).run()
    cut, kept = Stack(model(), pool(), [job(0, plans[0])], TUNING, **options), {}

    def note(_: Job, state: Any) -> None:
        if state.step == 4:
            kept["state"] = copy.deepcopy(cut.state_of("0"))

    alone = cut.run(note)["0"]
    again = Stack(model(), pool(), [job(0, plans[0])], TUNING, **options)
    again.load_state_of("0", kept["state"])
    for other in (together["0"], again.run()["0"]):
        torch.testing.assert_close(other.prompt, alone.prompt)
        assert other.history == alone.history


def test_each_round_takes_every_task_once_in_another_order_and_all_rows_in_turn() -> None:
    rows = meta_rows(0)
    groups = torch.arange(len(pool())) % 3
    turns = [[int(groups[rows.in_turn(3 * round_ + place)][0]) for place in range(3)] for round_ in range(6)]
    assert all(sorted(turn) == [0, 1, 2] for turn in turns) and len({tuple(turn) for turn in turns}) > 1
    within = torch.stack([rows.in_turn(0, part, 5) for part in range(5)])
    assert len(within.unique()) == within.numel() and not {*within.flatten().tolist()} & {
        *torch.stack(rows.held_out).flatten().tolist()
    }


def test_tasks_of_fewer_labels_have_their_own_words_and_no_middle() -> None:
    data = PromptData.of(made_sentiment()["yelp5"], [made_sentiment()["sst2"]], TRIAL)
    inputs, count = PromptInputs(TRIAL, data, Machine()), 100
    own = inputs.pretraining("labelled", (2, 3, 5))
    labels, words = data.pretraining.require_labels(), inputs.prompted.verbalizer.words
    assert len(own) == 3 * count and own.allowed is not None
    for part, names in enumerate((("bad", "good"), ("bad", "maybe", "good"), words[:5])):
        mask = own.allowed[part * count]
        assert {word for word, on in zip(words, mask.tolist(), strict=True) if on} == {*names}
        given = [words[label] for label in own.batch.labels[part * count : (part + 1) * count].tolist()]  # type: ignore[index]
        fewer = fewer_labels(labels, len(names)).tolist()
        assert all(label < 0 or names[label] == word for label, word in zip(fewer, given, strict=True))
    groups = inputs.rows_by_labels(torch.arange(count) % 4, "labelled", (2, 3, 5)).reshape(3, count)
    assert [sorted({*row.tolist()}) for row in groups] == [[-1, 0, 3], [-1, 1], [-1, 2]]
    assert not (labels[groups[0] >= 0] == 2).any() and (labels[groups[1] >= 0] == 2).any()
    stack = Stack(inputs.prompted, own, [replace(job(0, lambda _: torch.arange(4)), prompt=torch.zeros(3, 32))], TUNING)
    right, _ = stack._hits(torch.zeros(1, 3, 32), torch.arange(8)[None], stack._allowed([], torch.arange(8)[None]))
    scores = inputs.prompted(torch.zeros(3, 32), own.gather(torch.arange(8)))[:, [1, 3]]  # bad, good
    labels_of = own.batch.labels[:8]  # type: ignore[index]
    assert right[0].tolist() == (torch.tensor([1, 3])[scores.argmax(1)] == labels_of).tolist()


def test_every_row_has_the_same_passes_and_of_first_order_the_same_updates_and_reads() -> None:
    fair = recipe_of(options_of(["--recipe", "fair"]))
    for objective in ("mixed", "multitask", "meta", "reptile"):
        assert fair.steps(objective, 10) == 4_000 and fair.reads_per_step(objective, 10) == 4
        for changed in (fair, replace(fair, meta=replace(fair.meta, order=2, inner_steps=3), fair=Fair(tasks=2))):
            passes = changed.steps(objective, 10) * passes_per_step(changed, objective, 10)
            assert 0.99 * 32_000 < passes <= 32_000
    with pytest.raises(InputError, match=r"reads must be at least 40, the rows of a step, got 39"):
        replace(fair, reads=39).steps("reptile", 10)


def test_only_recipe_fair_has_reptile_and_other_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--smoke", "--device", "cpu", "--no-figures", "--out", str(tmp_path), "--sets", "sst2"]
    assert main([*words, "--methods", "reptile-kmeans"]) == 2
    assert "reptile-kmeans is a row of budget fair: give --recipe fair, or leave it out" in capsys.readouterr().err
    assert "reptile-kmeans" not in options_of([*words, "--methods", "all"]).methods
    for change, told in (({"fair": Fair(tasks=2)}, "need budget fair"), ({"budget": "fair"}, "takes no schedule")):
        with pytest.raises(InputError, match=told):
            replace(PromptRecipe(meta=Meta(scheduler="exp3")), **change)
    with pytest.raises(InputError, match="labels of pretraining are some of 2, 3, 5"):
        PromptMethod(objective="mixed", labels=(4,))


def test_a_fair_table_starts_from_the_vocabulary_and_goes_on(tmp_path: Path) -> None:
    rows = ["ppt", "multitask", "metapt-kmeans", "reptile-random", "ppt-235", "metapt-235", "reptile-235"]
    words = ["--smoke", "--recipe", "fair", "--device", "cpu", "--no-figures", "--out", str(tmp_path), "--sets", "sst2"]
    words += ["--set", "meta.order=1", "fair.updates=5"]
    assert main([*words, "--methods", ",".join(rows), "--seeds", "0", "1"]) == 0
    root = tmp_path / "prompts/made-fair-tiny-smoke"
    for name in rows:
        result = json.loads((root / f"{name}-s1/result.json").read_text())
        assert (result["budget"]["pretrain_passes"], result["budget"]["pretrain_reads"]) == (160, 80)
        about = json.loads((root / f"pretrain-{ROWS[name].pretraining}-s1/config.json").read_text())["config"]["model"]
        assert about["start"] == "vocabulary"
    before = {file: file.read_bytes() for file in root.glob("*/result.json")}
    assert main([*words, "--methods", ",".join(rows), "--seeds", "0", "1", "--resume"]) == 0
    assert {file: file.read_bytes() for file in before} == before
