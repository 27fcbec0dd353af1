"""Few-shot training: batches of episodes, the step's gradient, ranks, the best weights, transductive or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import fewshot_learning as learning
import pytest
import torch
from fewshot_experiment import (
    FewShotExperiment,
    FewShotRecipe,
    ImageBatches,
    TrainedLearner,
    meta_training,
    score_episodes,
)
from fewshot_learning import (
    EPISODES,
    FROZEN_SEED,
    LEARNERS,
    SUPERVISED,
    EpisodeStacks,
    FewShotMethod,
    MetaStep,
    build_learner,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from metapretrain.data.few_shot import FewShotData
from metapretrain.data.registry import load_few_shot
from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import evaluate_episodes
from metapretrain.experiments.base import Context, Machine
from metapretrain.maml import CompiledMeta
from metapretrain.models.saved import is_transductive, load
from metapretrain.training import train
from tests.forks import ROOT, ended

SPEC = EpisodeSpec(3, 1, 2)
TINY = "mlp"


@pytest.fixture(scope="module")
def data() -> FewShotData:
    return load_few_shot("made", None, 8)


def batches(data: FewShotData, tasks: int = 4, **options: Any) -> EpisodeStacks:
    return EpisodeStacks(data.train.labels, SPEC, tasks, seed=3, **options)


def test_batches_of_two_ranks_are_the_one_process_batch(data: FewShotData) -> None:
    whole = list(islice(batches(data), 3))
    parts = [list(islice(batches(data, rank=rank, world_size=2), 3)) for rank in (0, 1)]
    for position, batch in enumerate(whole):
        for name, rows in batch.items():
            together = torch.stack([parts[rank][position][name] for rank in (0, 1)], 1).flatten(0, 1)
            assert torch.equal(together, rows)


def test_batches_start_anywhere_and_hold_labelled_rows(data: FewShotData) -> None:
    first = list(islice(batches(data), 5))
    late = next(batches(data).iter_from(4))
    assert all(torch.equal(late[name], first[4][name]) for name in late)
    labels = data.train.labels
    for task in range(4):
        seen = {int(y): int(labels[row]) for row, y in zip(late["support"][task], late["support_y"][task], strict=True)}
        asked = labels[late["query"][task]].tolist()
        assert [seen[y] for y in late["query_y"][task].tolist()] == asked
        assert not set(late["support"][task].tolist()) & set(late["query"][task].tolist())
    with pytest.raises(InputError, match="tasks=3 must be a multiple of the 2 processes"):
        batches(data, tasks=3, world_size=2)


@pytest.mark.parametrize("within", ["", "tests", "all"])
@pytest.mark.parametrize("learner", ["protonet", "maml"])
def test_episodes_stay_inside_an_alphabet(
    data: FewShotData, within: str, learner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rows of all episodes that training, validation and test look at; alphabets of ten characters each."""
    parts = {name: getattr(data, name) for name in ("train", "validation", "test")}
    named = {
        name: replace(part, classes=[f"{name}{number // 10}/{number}" for number in range(len(part.classes))])
        for name, part in parts.items()
    }
    seen: dict[str, set[int]] = {}
    drawn = EpisodeSampler.__init__

    def noted(self: EpisodeSampler, labels: Any, *rest: Any, **how: Any) -> None:
        drawn(self, labels, *rest, **how)
        part = next(name for name, part in named.items() if len(part) == len(labels))
        several = [len({int(labels[row]) // 10 for row in self.plan(number)}) for number in range(10)]
        seen.setdefault(part, set()).update(several)

    monkeypatch.setattr(EpisodeSampler, "__init__", noted)
    method = FewShotMethod(learner, updates=1, tasks=2, validations=1, ways=15 if within != "all" else None)
    recipe = FewShotRecipe(SPEC, TINY, test_episodes=5, validation_episodes=5, within=within)
    experiment = FewShotExperiment(
        "fewshot", "made", "short", recipe, FewShotData.of(named), Machine(), Path(), figures=None
    )
    experiment.check({learner: method}, [0])
    context = Context(learner, method, 0, recipe, FewShotData.of(named), Machine())
    step, training = meta_training(context)
    train(**vars(training))
    experiment.score(context, TrainedLearner(step))
    inside = {name for name, counts in seen.items() if counts == {1}}
    assert inside == {"": set(), "tests": {"validation", "test"}, "all": set(named)}[within]


def test_classes_without_a_group_are_refused(data: FewShotData) -> None:
    recipe = FewShotRecipe(SPEC, TINY, within="tests")
    with pytest.raises(InputError, match=r"class 'test glyph 0' of the test part has no group.*leave --within out"):
        recipe.groups(data.test)
    assert recipe.groups(data.train) is None


def test_no_more_ways_than_a_group_has_classes(data: FewShotData) -> None:
    classes = [f"{'big' if number < 12 else 'small'}/{number}" for number in range(len(data.train.classes))]
    named = replace(data, train=replace(data.train, classes=classes))
    method = FewShotMethod("protonet", updates=1, tasks=1, ways=60)
    ways = {within: FewShotRecipe(SPEC, TINY, within=within).training(method, named).ways for within in ("", "all")}
    assert ways == {"": 40, "all": 28}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", [name for name in LEARNERS if name != SUPERVISED])  # it learns from no episodes
def test_the_steps_gradient_is_that_of_the_losses(
    data: FewShotData, name: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "CompiledMeta", partial(CompiledMeta, backend="eager"))  # no C++ compiler
    method = FewShotMethod(name, updates=1, tasks=4, inner_lr=0.1)
    learner = build_learner(method, TINY, data, 3, seed=0)
    step = MetaStep(learner, data.train.images, compile=compile)
    batch = next(iter(batches(data)))
    images = data.train.images
    support, query = ((images[batch[part]], batch[f"{part}_y"]) for part in ("support", "query"))
    loss = learner.losses(support, query).mean()
    expected = torch.autograd.grad(loss, list(learner.parameters()))
    found = step({EPISODES: batch})[EPISODES]
    torch.testing.assert_close(found, loss)
    assert all(p.grad is None for p in learner.parameters())
    (2 * found).backward()
    for p, grad in zip(learner.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad, rtol=1e-4, atol=1e-6)
    step({EPISODES: batch})[EPISODES].backward()  # adds to what is there, as any loss does
    for p, grad in zip(learner.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, 3 * grad, rtol=1e-4, atol=1e-6)


def test_meta_steps_are_compiled_by_themselves_where_that_pays(
    data: FewShotData, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []  # of what would be compiled, with so many arguments

    def compiled(learner: Any, *parts: Any, **more: Any) -> Any:
        calls.append(len(parts) + len(more))
        return learner.eager_backward(*parts, **more)

    monkeypatch.setattr(learning, "CompiledIfPossible", lambda: compiled)
    learner = build_learner(FewShotMethod("maml", updates=1, tasks=4), TINY, data, 3, seed=0)
    found = {}
    for updates, on_gpu, fading in ((10, True, 0), (10**9, True, 0), (10**9, False, 0), (10**9, True, 2)):
        batch = next(iter(batches(data, fading=(1, fading))))
        step = MetaStep(
            learner,
            data.train.images.as_subclass(OnGpu) if on_gpu else data.train.images,
            compile=None,
            updates=updates,
        )
        step({EPISODES: batch})
        found[updates, on_gpu, fading > 0] = len(calls) and calls.pop()
    assert found == {(10, True, False): 0, (10**9, True, False): 2, (10**9, False, False): 0, (10**9, True, True): 3}


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("name", ["maml", "fomaml", "metasgd"])
def test_normalisation_may_stay_out_of_the_inner_loop(data: FewShotData, name: str) -> None:
    method = FewShotMethod(name, updates=1, tasks=2, inner_lr=0.1, adapt_norms=False)
    learner = build_learner(method, "conv4-strided", load_few_shot("made", None, 28), 3, seed=0)
    norms = {n for n, p in learner.module.named_parameters() if p.ndim == 1 and "encoder" in n}
    assert norms and not norms & set(learner.only)
    assert set(learner.only) | norms == {n for n, _ in learner.module.named_parameters()}
    x, y = torch.randint(0, 255, (2, 6, 1, 28, 28), dtype=torch.uint8), torch.arange(6).remainder(3).repeat(2, 1)
    learner.backward((x, y), (x, y))
    assert all(p.grad is not None for p in learner.module.parameters())  # learned outside


def test_protonet_trains_with_more_ways_and_learns_the_glyphs(data: FewShotData) -> None:
    method = FewShotMethod("protonet", updates=30, tasks=2, ways=10, validations=3)
    tested = EpisodeSpec(5, 1, 5)
    before = build_learner(method, TINY, data, 10, seed=0)
    recipe = FewShotRecipe(tested, TINY, validation_episodes=20)
    step, training = meta_training(Context("protonet", method, 0, recipe, data, Machine()))
    report = train(**vars(training))
    assert report.steps == 30 and report.best.step in (10, 20, 30)
    after = score_episodes(step.learner, data.test, tested, 60)
    assert after.mean > score_episodes(before, data.test, tested, 60).mean + 0.05
    assert score_episodes(step.learner, data.validation, tested, 20).mean == report.best.value
    assert step.learner.ways == 10


def test_embedding_all_images_once_changes_no_figure(data: FewShotData) -> None:
    learner = build_learner(FewShotMethod("protonet", 1, 1), TINY, data, 10, seed=0).eval()
    tested = EpisodeSpec(5, 2, 5)
    assert 10 * tested.longest <= len(data.test) < 30 * tested.longest
    sampler = EpisodeSampler(data.test.labels, tested, 30, seed=FROZEN_SEED["test"])
    learner.ways = None
    one_by_one = evaluate_episodes(learner, data.test.images, sampler)
    assert score_episodes(learner, data.test, tested, 30).values == one_by_one.values
    assert score_episodes(learner, data.test, tested, 10).values == one_by_one.values[:10]


def test_who_is_transductive(data: FewShotData) -> None:
    large = load_few_shot("made", None, 16)
    answers = {
        (name, backbone, norm): is_transductive(
            build_learner(FewShotMethod(name, 1, 1, batchnorm=norm), backbone, large, 3, seed=0)
        )
        for name, backbone, norm in (
            ("maml", "conv4", "batch"),
            ("maml", "conv4", "support"),
            ("maml", "mlp", "batch"),
            ("protonet", "conv4", "batch"),
        )
    }
    assert list(answers.values()) == [True, False, False, False]


def test_values_that_make_no_sense_are_refused(data: FewShotData) -> None:
    with pytest.raises(InputError, match=r"learner 'protonets'.*protonet"):
        FewShotMethod("protonets", 1, 1)
    with pytest.raises(InputError, match="tasks is 0; give a whole number of at least 1"):
        FewShotMethod("maml", 1, 0)
    with pytest.raises(InputError, match="ways is 1; give a whole number of at least 2"):
        FewShotMethod("protonet", 1, 1, ways=1)
    with pytest.raises(InputError, match=r"drop is 1\.5; give a number of at least 0 and below 1"):
        FewShotMethod("protonet", 1, 1, drop=1.5)
    machine, recipe = Machine(precision="fp16"), FewShotRecipe(SPEC, TINY, validation_episodes=1)
    with pytest.raises(InputError, match="precision fp16 would lose small inner gradients"):
        meta_training(Context("maml", FewShotMethod("maml", 1, 1), 0, recipe, data, machine))


def test_ways_of_training_are_protonets_alone_and_no_more_than_there_are() -> None:
    tested = EpisodeSpec(5, 1, 15)
    assert FewShotMethod("protonet", 1, 1, ways=60).spec(tested, 40) == EpisodeSpec(40, 1, 5)
    assert FewShotMethod("maml", 1, 1, ways=60).spec(tested, 40) == EpisodeSpec(5, 1, 5)
    assert FewShotMethod("maml", 1, 4, inner_steps=5).encoder_passes(EpisodeSpec(5, 1, 5)) == 4 * 5 * (5 + 5)


SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
"""
SCRIPT += """
from argparse import Namespace
import torch
from safetensors.torch import save_file
from metapretrain.data.registry import load_few_shot
from metapretrain.episodes import EpisodeSpec
from fewshot_learning import FewShotMethod, EpisodeStacks, build_learner
from fewshot_experiment import FewShotRecipe, meta_training
from metapretrain.experiments.base import Context
from metapretrain.training import train
from fewshot_learning import EPISODES, MetaStep
from metapretrain.experiments.command import machine_of

machine = machine_of(Namespace(device="cpu", precision="fp32"))
data, spec, found = load_few_shot("made", None, 16), EpisodeSpec(3, 1, 2), {}
backbones = {"maml": "conv4", "fomaml": "mlp", "anil": "mlp", "metasgd": "mlp", "protonet": "mlp"}
for kind, backbone in backbones.items():
    method = FewShotMethod(kind, updates=3, tasks=4, inner_lr=0.1, validations=1)
    step = MetaStep(build_learner(method, backbone, data, 3, 0), data.train.images)
    tasks = EpisodeStacks(data.train.labels, spec, 4, seed=1, rank=machine.rank, world_size=machine.world)
    step({EPISODES: next(iter(tasks))})[EPISODES].backward()
    found |= {f"{kind} {name}": p.grad for name, p in step.learner.named_parameters()}
    if kind not in ("maml", "protonet"):
        continue
    recipe = FewShotRecipe(spec, backbone, validation_episodes=2)
    trained, training = meta_training(Context(kind, method, 0, recipe, data, machine))
    report = train(**vars(training))
    found[f"{kind} loss"] = torch.tensor(report.losses[EPISODES])
if machine.rank == 0:
    save_file(found, sys.argv[1])
from metapretrain.checks import leave_ranks
leave_ranks()
"""


def run(environments: list[dict[str, str]], out: Path) -> dict[str, torch.Tensor]:
    ended(SCRIPT, [[str(out)]] * len(environments), environments, out.parent)
    return load_file(out)


def test_two_ranks_have_the_one_process_gradient(tmp_path: Path, ranks: Callable[[int], list[dict[str, str]]]) -> None:
    one, two = run(ranks(1), tmp_path / "one"), run(ranks(2), tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        gap = (two[name] - value).norm() / value.norm()
        assert gap < (1e-3 if name.endswith("loss") else 1e-5), f"{name}: {gap:.1e}"


def test_distortion_reaches_the_training_images_alone(data: FewShotData) -> None:
    seen: list[Tensor] = []

    class Watched(nn.Module):
        def backward(self, support: Any, query: Any) -> Tensor:
            seen.extend([support[0], query[0]])
            return torch.zeros(())

    def shown(**options: Any) -> list[Tensor]:
        seen.clear()
        distort = FewShotMethod("protonet", 1, 1, **options).distortion(size=data.train.image_size, channels=1)
        torch.manual_seed(0)
        MetaStep(Watched(), data.train.images, distort)({EPISODES: next(iter(batches(data)))})
        return list(seen)

    plain, moved, again = shown(), shown(shift=0.1), shown(shift=1e-9)
    for before, after, still in zip(plain, moved, again, strict=True):
        assert before.shape == after.shape == still.shape
        assert not torch.allclose(before.float(), after)
        torch.testing.assert_close(before.float(), still, atol=0.01, rtol=0)
        assert after.min() >= 0 and after.max() <= 255.01


@pytest.mark.parametrize("wrong", [{"rotate": -1.0}, {"shift": 2.0}, {"crop": 0.0}, {"crop": 1.5}])
def test_distortions_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"rotate|shift|crop"):
        FewShotMethod("protonet", 1, 1, **wrong)


def test_losses_after_each_step_fade_out_with_the_updates(data: FewShotData) -> None:
    found = [batch.get("step_weights") for batch in islice(batches(data, fading=(2, 4)), 6)]
    assert [None if w is None else w.tolist() for w in found] == [
        [0.5, 0.5],
        [0.375, 0.625],
        [0.25, 0.75],
        [0.125, 0.875],
        None,
        None,
    ]
    late = next(batches(data, fading=(2, 4)).iter_from(3))
    assert torch.equal(late["step_weights"], found[3])


def test_a_step_with_fading_losses_has_the_learners_gradient(data: FewShotData) -> None:
    method = FewShotMethod("maml", updates=2, tasks=2, inner_steps=2, learn_rates=True, fade=1.0, batchnorm="support")
    learner = build_learner(method, TINY, data, 3, seed=0)
    batch = next(iter(batches(data, tasks=2, fading=(2, 2))))
    MetaStep(learner, data.train.images)({EPISODES: batch})[EPISODES].backward()
    found = {name: p.grad.clone() for name, p in learner.named_parameters()}
    learner.zero_grad()
    support, query = ((data.train.images[batch[part]], batch[f"{part}_y"]) for part in ("support", "query"))
    learner.backward(support, query, step_weights=torch.tensor([0.5, 0.5]))
    assert all(torch.equal(p.grad, found[name]) for name, p in learner.named_parameters())
    assert sum("rates" in name for name in found) == 6  # three layers with a bias each


def test_reptile_takes_its_examples_in_batches(data: FewShotData) -> None:
    method = FewShotMethod("reptile", updates=2, tasks=2, shots=3, queries=1, inner_steps=4, batches=2)
    assert build_learner(method, TINY, data, 3, seed=0).batches == 2 and method.stored()["batches"] == 2
    assert method.encoder_passes(method.spec(SPEC, 3)) == 2 * 3 * (4 * 4 / 2 + 1)


def test_a_compiled_step_takes_fading_losses(data: FewShotData) -> None:
    method = FewShotMethod("maml", updates=2, tasks=2, inner_steps=2, fade=1.0)
    batch = next(iter(batches(data, tasks=2, fading=(2, 2))))
    learner = build_learner(method, TINY, data, 3, 0)
    plain, compiled = (MetaStep(learner, data.train.images, compile=compile) for compile in (False, True))
    assert compiled._compiled is not None
    torch.testing.assert_close(compiled({EPISODES: batch}), plain({EPISODES: batch}))


def test_newer_choices_are_kept_only_where_they_are_no_default() -> None:
    """Runs of before these choices go on and are loaded."""
    assert set(FewShotMethod("protonet", 1, 1).stored()) == {
        *(
            "learner",
            "updates",
            "tasks",
            "lr",
            "schedule",
            "warmup",
            "clip",
            "ways",
            "queries",
            "inner_lr",
            "inner_steps",
        ),
        *("test_steps", "batchnorm", "adapt_norms", "chunk", "rotate", "shift", "crop", "validations"),
    }
    assert FewShotMethod("protonet", 1, 1, drop=0.1, shots=3).stored().items() >= {"drop": 0.1, "shots": 3}.items()


def test_after_training_with_the_validation_classes_the_last_weights_are_tested(data: FewShotData) -> None:
    method, recipe = FewShotMethod("protonet", 3, 1), FewShotRecipe(SPEC, TINY, 5, 5, trainval=True)
    experiment = FewShotExperiment("fewshot", "made", "short", recipe, data, Machine(), Path(), figures=None)
    context = Context("protonet", method, 0, recipe, data, Machine())
    trained = experiment.train(context)
    assert trained.report is not None and not trained.report.best.history
    outcome = experiment.outcome(context, trained, experiment.score(context, trained))
    assert "validation_accuracy" not in outcome.metrics and outcome.budget["best_step"] == 3
    assert experiment.config(method)["trainval"] is True


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_takes_a_step_and_is_scored(data: FewShotData, learner: str) -> None:
    method = FewShotMethod(learner, updates=2, tasks=8, validations=1, flip=True, jitter=0.2, pad=1)
    context = Context(learner, method, 0, FewShotRecipe(SPEC, TINY, 5, 5), data, Machine())
    step, training = meta_training(context)
    before = {name: p.detach().clone() for name, p in step.learner.named_parameters()}
    train(**vars(training))
    moved = {name for name, p in step.learner.named_parameters() if not torch.equal(p, before[name])}
    assert moved >= {name for name in before if "bias" not in name}
    result = score_episodes(step.learner, data.test, SPEC, 5)
    assert result.n == 5 and 0 <= result.mean <= 1


def test_what_a_learner_cannot_do_is_refused() -> None:
    with pytest.raises(InputError, match="maml adapts weights, which takes no DropBlock: give drop=0"):
        FewShotMethod("maml", 1, 1, drop=0.1)
    with pytest.raises(InputError, match="protonet has no loss between its steps: give fade=0"):
        FewShotMethod("protonet", 1, 1, fade=0.5)
    with pytest.raises(InputError, match="metasgd learns no rates by step"):
        FewShotMethod("metasgd", 1, 1, learn_rates=True)
    with pytest.raises(InputError, match="fomaml takes the whole support in each step: give batches=1, or take"):
        FewShotMethod("fomaml", 1, 1, batches=2)
    with pytest.raises(InputError, match="no supervised training to start from: give pretrained=false"):
        FewShotRecipe(SPEC, TINY).pretraining(FewShotMethod("protonet", 1, 1, pretrained=True))
    with pytest.raises(InputError, match="did you mean 'logistic'"):
        FewShotMethod("supervised", 1, 1, head="logistc")


def test_images_of_a_supervised_training_are_each_seen_once_an_epoch(data: FewShotData) -> None:
    images = ImageBatches(data.train.labels, 100, seed=0)
    seen = torch.cat([batch["query"][0] for batch in images])
    assert len(images) == 8 and seen.sort().values.tolist() == list(range(800))
    late = next(images.iter_from(5))
    assert torch.equal(late["query_y"][0], data.train.labels[late["query"][0]])
    assert torch.equal(late["query"][0], seen[500:600])


def test_quarter_turns_are_classes_of_their_own() -> None:
    x, y = torch.rand(1, 40, 3, 4, 4), torch.arange(40)[None] % 5
    turned, labels = learning.quarter_turns(x, y, 5)
    assert torch.equal(labels % 5, y) and set((labels // 5).flatten().tolist()) == {0, 1, 2, 3}
    for image, before, label in zip(turned[0], x[0], labels[0].tolist(), strict=True):
        assert torch.equal(image, before.rot90(label // 5, (1, 2)))


def test_a_supervised_training_with_turns_is_read_back(data: FewShotData, tmp_path: Path) -> None:
    method = FewShotMethod("supervised", 2, 8, head="centred", turns=True, validations=1)
    recipe = FewShotRecipe(SPEC, TINY, 5, 5, supervised=replace(method, head=None))
    experiment = FewShotExperiment("fewshot", "made-3w1s", "turns", recipe, data, Machine(), tmp_path, figures=None)
    experiment.row("supervised-centroid", method, 0)
    saved = load(experiment.path("supervised-centroid", 0))
    assert saved.learner.classifier.out_features == 4 * len(data.train.classes)
    with pytest.raises(InputError, match="protonet tells no turns: leave turns out"):
        FewShotMethod("protonet", 1, 1, turns=True)


def test_a_learned_temperature_moves_and_is_read_back(data: FewShotData, tmp_path: Path) -> None:
    method = FewShotMethod("protonet", 3, 1, temperature=0.1, distance="cosine", learn_temperature=True, validations=1)
    recipe = FewShotRecipe(SPEC, TINY, 5, 5)
    experiment = FewShotExperiment("fewshot", "made", "cosine", recipe, data, Machine(), tmp_path, figures=None)
    experiment.row("protonet", method, 0)
    learner = load(experiment.path("protonet", 0)).learner
    assert learner.distance == "cosine" and 0 < abs(learner.log_temperature.exp().item() - 0.1) < 0.05
