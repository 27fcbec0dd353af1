"""Objectives and heads of text tasks against the paper's pseudocode and losses written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metapretrain.data.made import made_tasks
from metapretrain.data.texts import TextSet, TextTask
from metapretrain.data.tokens import padded_width, tokenize
from metapretrain.errors import InputError
from metapretrain.experiments.text.objectives import (
    TextClasses,
    TextLabels,
    TextOrdinal,
    TextPrototypes,
    TextRows,
    TextStep,
    build_heads,
    disagreement,
    head_predictions,
    prototype_outputs,
    shares_of,
    task_gradients,
    task_prototypes,
)
from metapretrain.experiments.text.recipe import TextMethod, TextPhase, TextRecipe, loss_weights, parse_weights
from metapretrain.models.text_encoders import CosineHead, PairHead, TextEncoder, build_text_encoder
from metapretrain.protonet import ProtoLoss

TASKS = made_tasks(rows=24)
ROWS = torch.tensor([3, 0, 17, 8, 5, 11])


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return build_text_encoder("tiny", dropout=0.0)


def step_of(encoder: TextEncoder, joined: bool, make: Any, **options: Any) -> TextStep:
    objectives = {}
    for task in TASKS:
        tokens = tokenize(task.train, encoder.tokenizer, max_length=64, joined=joined)
        objectives[task.name] = make(TextRows(task, tokens), task)
    return TextStep(encoder, objectives, **options)


def batches_of(step: TextStep) -> dict[str, Any]:
    widths = [step.objective(task.name).texts.tokens.widths[ROWS].max() for task in TASKS]
    width = padded_width(torch.stack(widths))
    return {task.name: {"rows": ROWS, "width": torch.empty(width, 0)} for task in TASKS}


def encoded(encoder: TextEncoder, *columns: list[str]) -> Tensor:
    """Each row alone, without padding."""
    z = []
    for row in ROWS.tolist():
        tokens = encoder.tokenizer(*[column[row] for column in columns], return_tensors="pt")
        z.append(encoder(tokens)[0])
    return torch.stack(z)


def proto_step(latents: Tensor, labels: Tensor) -> Tensor:
    """Appendix A.2 of the paper as it stands."""
    class_vectors: dict[int, list[Tensor]] = {}
    for latent, label in zip(latents, labels.tolist(), strict=True):
        class_vectors.setdefault(label, []).append(latent)
    label_map = {label: place for place, label in enumerate(sorted(class_vectors))}
    protos = torch.stack([torch.stack(class_vectors[label]).mean(0) for label in sorted(class_vectors)])
    logits = -torch.cdist(latents, protos)
    return F.cross_entropy(logits, torch.tensor([label_map[label] for label in labels.tolist()]))


def test_the_separate_prototypical_step_is_appendix_a2(encoder: TextEncoder) -> None:
    step = step_of(encoder, False, lambda rows, task: TextPrototypes(rows, ProtoLoss(num_classes=task.num_classes)))
    losses = step(batches_of(step))
    parameters = list(encoder.parameters())
    for task in TASKS:
        first, second = task.train.first, task.train.second
        latents = encoded(encoder, first)
        if second is not None:
            latents = latents + encoded(encoder, second)
        labels = task.train.labels[ROWS]
        if task.name == "sts":
            labels = torch.tensor([int(value + 0.5) for value in labels.tolist()])  # half up
        slow = proto_step(latents, labels)
        torch.testing.assert_close(losses[task.name], slow)
        ours, theirs = task_gradients([losses[task.name], slow], parameters)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("joined", [True, False])
def test_losses_of_section_5_3(encoder: TextEncoder, joined: bool) -> None:
    heads = build_heads(TASKS, TextMethod(joined=joined), "cosine", encoder.features).eval()
    step = step_of(encoder, joined, lambda rows, task: TextLabels(rows, heads[task.name])).eval()
    losses = step(batches_of(step))
    for task in TASKS:
        columns = [task.train.first, *([task.train.second] if task.train.second is not None else [])]
        z = [encoded(encoder, *columns)] if joined else [encoded(encoder, column) for column in columns]
        outputs, labels = heads[task.name](*z), task.train.labels[ROWS]
        if task.name == "sst":
            wanted = -outputs.log_softmax(1)[torch.arange(6), labels].mean()
        elif task.name == "para":
            p = outputs.sigmoid()
            wanted = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
        else:
            wanted = ((outputs - labels) ** 2).mean()
        torch.testing.assert_close(losses[task.name], wanted, rtol=1e-4, atol=1e-6)
        predicted = head_predictions(task, heads[task.name], z)
        assert predicted.dtype == (torch.float32 if task.name == "sts" else torch.int64) and predicted.shape == (6,)


def test_smoothed_labels_are_mixed_with_chance_and_scores_are_not(encoder: TextEncoder) -> None:
    z = [torch.randn(len(ROWS), encoder.features)]
    for task, head in zip(
        TASKS, build_heads(TASKS, TextMethod(joined=True), "mlp", encoder.features).values(), strict=True
    ):
        rows = TextRows(task, tokenize(task.train, encoder.tokenizer, max_length=64, joined=True))
        plain, smoothed = (TextLabels(rows, head.eval(), smoothing).loss(z, ROWS) for smoothing in (0.0, 0.2))
        outputs = head(z[0])
        if task.name == "sst":
            chance = -outputs.log_softmax(1).mean()
        elif task.name == "para":
            chance = -(outputs.sigmoid().log() + (-outputs).sigmoid().log()).mean() / 2
        else:
            chance = plain
        torch.testing.assert_close(smoothed, 0.8 * plain + 0.2 * chance)


def test_the_encoder_runs_once_for_rows_of_one_width(encoder: TextEncoder) -> None:
    shapes = []
    hook = encoder.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0]["input_ids"].shape)))
    step = step_of(encoder, False, lambda rows, task: TextClasses(rows, nn.Linear(32, task.num_classes)))
    batches = batches_of(step)
    width = batches["sst"]["width"].shape[0]
    together = step(batches)
    batches["sts"] = {"rows": ROWS, "width": torch.empty(width + 16, 0)}
    apart = step(batches)
    hook.remove()
    assert shapes == [(6 + 12 + 12, width), (6 + 12, width), (12, width + 16)]
    torch.testing.assert_close(together, apart)


def test_the_sum_is_weighted(encoder: TextEncoder) -> None:
    def make(rows: TextRows, task: Any) -> nn.Module:
        return TextPrototypes(rows, ProtoLoss(num_classes=task.num_classes))

    plain = step_of(encoder, True, make)
    weighted = step_of(encoder, True, make, weights={"sst": 0.98, "para": 0.01})
    ours, theirs = weighted(batches_of(weighted)), plain(batches_of(plain))
    assert ours["sst"].item() == pytest.approx(0.98 * theirs["sst"].item())
    assert ours["para"].item() == pytest.approx(0.01 * theirs["para"].item())
    assert ours["sts"].item() == theirs["sts"].item()


def test_surgery_changes_gradients_and_no_value(encoder: TextEncoder) -> None:
    torch.manual_seed(0)  # heads whose gradients conflict
    heads = build_heads(TASKS, TextMethod(joined=True), "mlp", encoder.features).eval()
    plain, cut = (
        step_of(encoder, True, lambda rows, task: TextLabels(rows, heads[task.name]), surgery=surgery).eval()
        for surgery in (False, True)
    )
    batches = batches_of(plain)
    cosines = plain.conflict(batches)
    assert set(cosines) == {"gradient_cosine_sst_para", "gradient_cosine_sst_sts", "gradient_cosine_para_sts"}
    assert min(cosines.values()) < 0 and max(map(abs, cosines.values())) <= 1 + 1e-6
    torch.testing.assert_close(plain(batches), cut(batches))
    parameters = [*encoder.parameters(), *heads.parameters()]
    ours, theirs = (
        task_gradients([torch.stack(list(step(batches).values())).sum()], parameters)[0] for step in (cut, plain)
    )
    count = len(list(encoder.parameters()))
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(ours[:count], theirs[:count], strict=True))
    torch.testing.assert_close(ours[count:], theirs[count:])


def test_conflict_leaves_the_state_alone(encoder: TextEncoder) -> None:
    step = step_of(encoder, True, lambda rows, task: TextPrototypes(rows, ProtoLoss("query", num_classes=6)))
    before = {name: value.clone() for name, value in step.state_dict().items()}
    step.conflict(batches_of(step))
    assert step.training and all(torch.equal(before[name], value) for name, value in step.state_dict().items())
    assert all(parameter.grad is None for parameter in step.parameters())


def test_shared_heads_learn_from_both_tasks() -> None:
    heads = build_heads(TASKS, TextMethod(shared=True), "cosine", 8)
    assert heads["para"].first is heads["sts"].first and heads["para"].second is heads["sts"].second
    assert heads["para"].output is not heads["sts"].output
    heads["sts"](torch.ones(2, 8), torch.ones(2, 8)).sum().backward()
    assert heads["para"].first.weight.grad.abs().sum() > 0
    apart = build_heads(TASKS, TextMethod(), "cosine", 8)
    assert apart["para"].first is not apart["sts"].first


@pytest.mark.parametrize(
    ("method", "sts"),
    [
        (TextMethod(sts="cosine"), CosineHead),
        (TextMethod(sts=None), CosineHead),
        (TextMethod(sts="mlp"), PairHead),
        (TextMethod(combine="concat"), PairHead),
    ],
)
def test_the_head_of_sts(method: TextMethod, sts: type) -> None:
    heads = build_heads(TASKS, method, "cosine", 8)
    assert type(heads["sts"]) is sts and type(heads["para"]) is PairHead
    assert heads["para"].combine == method.combine


def test_pairs_of_three_classes_have_three_outputs() -> None:
    class Three:
        name, kind, low, high, regression, num_classes = "nli", "pair-classification", 0.0, 1.0, False, 3

    for joined in (True, False):
        head = build_heads([Three()], TextMethod(joined=joined), "mlp", 8)["nli"]
        z = [torch.randn(4, 8)] * (1 if joined else 2)
        assert head(*z).shape == (4, 3) and head_predictions(Three(), head, z).max() <= 2


def test_weights_that_cannot_be_used_are_refused() -> None:
    phase = TextPhase(lr=1e-3)
    recipe = TextRecipe(1, phase, phase, phase, phase)
    for text, match in (("stt=1", "sst"), ("sst=-1", "0 or more"), ("sst", "task=number"), ("sst=nan", "0 or more")):
        with pytest.raises(InputError, match=match):
            parse_weights(text, ["sst", "para"])
    with pytest.raises(InputError, match="all loss weights are 0"):
        parse_weights("sst=0,para=0", ["sst", "para"])
    with pytest.raises(InputError, match="unknown task 'nli'"):
        loss_weights(recipe, TASKS, TextMethod(favoured="nli"))


def test_rdrop_adds_the_disagreement_of_two_passes_with_dropout() -> None:
    torch.manual_seed(0)
    encoder = build_text_encoder("tiny", dropout=0.3).train()
    heads = build_heads(TASKS, TextMethod(joined=True), "mlp", encoder.features)
    step = step_of(encoder, True, lambda rows, task: TextLabels(rows, heads[task.name]), rdrop=0.7)
    batches = batches_of(step)
    torch.manual_seed(1)
    found = step(batches)
    twice = {name: {**batch, "rows": batch["rows"].repeat(2)} for name, batch in batches.items()}
    torch.manual_seed(1)
    z = step.encode(twice)
    for task in TASKS:
        objective = step.objective(task.name)
        outputs = objective.head(*z[task.name]).float()
        plain, apart = objective._loss(outputs, ROWS.repeat(2)), 0.0
        first, second = outputs.chunk(2)
        if task.regression:
            apart = ((first - second) ** 2).mean()
        else:
            if outputs.ndim == 1:
                first, second = (torch.stack([1 - x.sigmoid(), x.sigmoid()], 1) for x in (first, second))
            else:
                first, second = first.softmax(1), second.softmax(1)
            there, back = (F.kl_div(a.log(), b, reduction="batchmean") for a, b in ((first, second), (second, first)))
            apart = (there + back) / 2
        assert apart > 0
        torch.testing.assert_close(disagreement(outputs, task.regression), apart)
        torch.testing.assert_close(found[task.name], plain + 0.7 * apart)


def test_rdrop_is_refused_where_no_encoder_learns() -> None:
    phase, dropped = TextPhase(lr=1e-3), TextPhase(lr=1e-3, rdrop=1.0)
    TextRecipe(1, dropped, dropped, dropped, phase)
    with pytest.raises(InputError, match="set it for joint, pretrain and finetune"):
        TextRecipe(1, phase, phase, phase, dropped)


def pretraining_objectives(features: int) -> dict[str, Any]:
    """One of each kind, for STS joined as one sequence: six classes."""
    task = TASKS[2]
    tokens = tokenize(task.train, build_text_encoder("tiny").tokenizer, max_length=64, joined=True)
    plain, ordinal = (TextRows(task, tokens, ordinal=ordinal) for ordinal in (False, True))
    head = nn.Linear(features, task.num_classes)
    return {
        "classes": TextClasses(plain, head, 0.1),
        "ordinal classes": TextClasses(ordinal, head, 0.1),
        "prototypes": TextPrototypes(plain, ProtoLoss(num_classes=6, label_smoothing=0.1)),
        "query": TextPrototypes(plain, ProtoLoss("query", num_classes=6, query_fraction=0.5)),
        "leave-one-out": TextPrototypes(plain, ProtoLoss("leave-one-out", num_classes=6)),
        "ordinal": TextOrdinal(ordinal, ProtoLoss(num_classes=6, temperature=4.0, label_smoothing=0.1)),
    }


@pytest.mark.parametrize("kind", pretraining_objectives(4))
def test_rdrop_of_pretraining_is_the_mean_loss_where_both_passes_agree_and_more_elsewhere(kind: str) -> None:
    torch.manual_seed(0)
    objective = pretraining_objectives(8)[kind].train()
    rows = torch.arange(20)
    z, other = torch.randn(2, 20, 8).unbind()
    copies = [pretraining_objectives(8)[kind].train() for _ in range(2)]
    for copy in copies:
        copy.load_state_dict(objective.state_dict())
    plain, second = (copy.loss([part], rows) for copy, part in zip(copies, (z, other), strict=True))

    def doubled(first: Tensor, last: Tensor, weight: float) -> Tensor:
        own = pretraining_objectives(8)[kind].train()
        own.load_state_dict(objective.state_dict())
        found: Tensor = own.doubled([torch.cat([first, last])], rows.repeat(2), weight)
        return found

    torch.testing.assert_close(doubled(z, z, 5.0), plain)  # query rows have no copy of themselves in the support
    torch.testing.assert_close(doubled(z, other, 0.0), (plain + second) / 2)
    apart = doubled(z, other, 1.0) - doubled(z, other, 0.0)
    assert apart > 0.01
    torch.testing.assert_close(doubled(z, other, 3.0) - doubled(z, other, 0.0), 3 * apart, rtol=1e-4, atol=1e-5)


def test_outputs_by_prototypes_by_hand() -> None:
    train = TextSet(list("abcd"), list("abcd"), torch.tensor([1.0, 1.4, 3.5, 4.0]))
    task = TextTask("sts", "pair-regression", train, train, train, low=1.0, high=5.0)
    z = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
    centres = task_prototypes(task, z, ordinal=False)
    torch.testing.assert_close(centres[:, 0], torch.tensor([0.1, math.nan, math.nan, 5.1, math.nan]), equal_nan=True)
    queries = torch.tensor([[0.3], [0.4], [6.0]])
    assert prototype_outputs(task, queries, centres, None).tolist() == [1.0, 1.0, 4.0]
    between = prototype_outputs(task, queries, centres, {"distance": "sqeuclidean", "temperature": 10.0})
    shares = torch.stack([-(queries - 0.1).square(), -(queries - 5.1).square()], 2)[:, 0].div(10).softmax(1)
    torch.testing.assert_close(between, shares @ torch.tensor([1.0, 4.0]))
    weighted = task_prototypes(task, z, ordinal=True)  # 1.4 belongs to class 0 (0.6) and 1 (0.4), 3.5 to 2 and 3
    torch.testing.assert_close(weighted[:2, 0], torch.tensor([0.12 / 1.6, 0.2]))
    rows = TextSet(list("ab"), labels=torch.tensor([0, 2]))
    sst = TextTask("sst", "classification", rows, rows, rows, classes=("a", "b", "c"))
    z = torch.tensor([[0.0], [1.0]])
    logits = prototype_outputs(sst, z.flip(0), task_prototypes(sst, z, ordinal=True), None)
    assert logits.argmax(1).tolist() == [2, 0]
    with pytest.raises(InputError, match="outputs of 1 of 3 inputs are NaN or infinite"):
        prototype_outputs(task, torch.tensor([[0.3], [math.nan], [6.0]]), centres, None)


def test_ordinal_prototypes_are_those_of_a_slow_loop() -> None:
    objective = pretraining_objectives(8)["ordinal"]
    z, rows = torch.randn(20, 8, dtype=torch.float64), torch.arange(20)
    scores = TASKS[2].train.labels[rows].double()
    weights = torch.zeros(20, 6, dtype=torch.float64)
    for place, score in enumerate(scores.tolist()):
        low = min(int(score), 4)
        weights[place, low], weights[place, low + 1] = 1 - (score - low), score - low
    assert (weights > 0).sum(1).max() == 2  # scores between two classes are there
    torch.testing.assert_close(weights @ torch.arange(6, dtype=torch.float64), scores)
    torch.testing.assert_close(shares_of(scores, 6), weights)
    there = [c for c in range(6) if weights[:, c].sum() > 0]
    centres = torch.stack([(weights[:, c, None] * z).sum(0) / weights[:, c].sum() for c in there])
    logits = -torch.cdist(z, centres) / 4
    target = 0.9 * weights[:, there] + 0.1 / len(there)
    wanted = -(target * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(objective.loss([z], rows), wanted, rtol=1e-5, atol=1e-6)


def test_ordinal_prototypes_come_to_stand_in_order() -> None:
    torch.manual_seed(0)
    objective, rows = pretraining_objectives(2)["ordinal"], torch.arange(24)
    z = torch.randn(24, 2, requires_grad=True)
    optimizer = torch.optim.Adam([z], 0.1)
    for _ in range(200):
        optimizer.zero_grad()
        objective.loss([z], rows).backward()
        optimizer.step()
    _, logits = objective._scored(z, rows)
    expected = logits.softmax(1) @ torch.arange(6.0)
    scores = TASKS[2].train.labels[rows]
    assert torch.corrcoef(torch.stack([expected, scores]))[0, 1] > 0.97
