"""Few-shot learning on the disk: the recipe of a table, and one run folder per method and seed, tested once."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from fewshot_learning import EPISODES, FROZEN_SEED, SUPERVISED, EpisodeStacks, FewShotMethod, MetaStep, build_learner
from torch import Tensor

from metapretrain.checks import whole
from metapretrain.data.few_shot import FewShotData, check_disjoint
from metapretrain.data.images import ImageSet
from metapretrain.episodes import EpisodePlan, EpisodeSampler, EpisodeSpec, ShuffledBatches, TaskStream
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.episodes import (
    EpisodeResult,
    evaluate_embeddings,
    evaluate_episodes,
    evaluate_finetuning,
    few_shot_accuracy,
)
from metapretrain.evaluation.representation import embed
from metapretrain.experiments.base import Context, Experiment, Machine, Outcome, Training, check_seeds
from metapretrain.experiments.images.data import describe
from metapretrain.experiments.saved import load_encoder
from metapretrain.files import load_tensors, one_line_errors, write_whole
from metapretrain.models.pretrained import ENCODER_HEADS, FINETUNE, TUNING, FineTuning, features_centre, kept_features
from metapretrain.models.saved import LEARNER, SavedLearner, SavedModel, adapts, is_transductive, needs_company
from metapretrain.protonet.learner import Classifier, EmbeddingLearner, ProtoNet
from metapretrain.training import TrainReport, TrainSettings, train

WITHIN = ("tests", "all")  # which episodes stay inside a group of classes: those of validation and test, or all


def groups_of(images: ImageSet) -> list[str]:
    """The group of each image, such as an alphabet: what stands before the / in the name of its class.

    InputError: a class whose name has no group.

    Example:
        >>> two = ImageSet(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([1, 0]), ["Greek/alpha", "Latin/a"])
        >>> groups_of(two)
        ['Latin', 'Greek']
    """
    if alone := [name for name in images.classes if "/" not in name]:
        raise InputError(
            f"class {alone[0]!r} of the {images.split} part has no group, which --within needs: a name such as "
            "Greek/character01; leave --within out"
        )
    groups = [name.partition("/")[0] for name in images.classes]
    return [groups[label] for label in images.labels.tolist()]


@dataclass(frozen=True)
class SavedEncoder:
    """The row of an encoder, by the name of :func:`metapretrain.experiments.saved.load_encoder`, and a head."""

    name: str
    head: str = "nearest"
    tuning: FineTuning = TUNING  # of the head `finetune`
    pretraining: ClassVar[str] = "encoder"  # one job does all heads: they share its features

    def __post_init__(self) -> None:
        one_of("head", self.head, ENCODER_HEADS)


@dataclass(frozen=True)
class FewShotRecipe:
    """How all rows of a few-shot table are tested, and their backbone.

    Args:
        tested: ways, shots and queries of validation and test episodes.
        backbone: see :data:`metapretrain.models.encoders.ENCODERS`.
        test_episodes, validation_episodes: how many, the same ones for every run.
        within: one of :data:`WITHIN`, or "" for episodes of any classes.
        supervised: the training that rows with `pretrained` start from.
        trainval: training has the validation classes too, which choose nothing: the last weights are tested.
    """

    tested: EpisodeSpec
    backbone: str
    test_episodes: int = 600
    validation_episodes: int = 200
    within: str = ""
    supervised: FewShotMethod | None = None
    trainval: bool = False

    def __post_init__(self) -> None:
        if self.within:
            one_of("within", self.within, WITHIN)

    def pretraining(self, method: FewShotMethod) -> FewShotMethod | None:
        """The supervised training that a row starts from, if it does."""
        if method.pretraining is None:
            return None
        if self.supervised is None:
            raise InputError("this recipe has no supervised training to start from: give pretrained=false")
        return self.supervised

    def groups(self, images: ImageSet) -> list[str] | None:
        """The groups that episodes of these images stay inside, if they do."""
        stay = self.within == "all" or (self.within and images.split != "train")
        return groups_of(images) if stay else None

    def training(self, method: FewShotMethod, data: FewShotData) -> EpisodeSpec:
        """The training episodes of a method, of no more ways than a group, or all classes, can have."""
        groups = self.groups(data.train)
        most = len(data.train.classes)
        if groups is not None:
            most = max(Counter(name.partition("/")[0] for name in data.train.classes).values())
        return method.spec(self.tested, most)


FewShotRow = FewShotMethod | SavedEncoder
FewShotContext = Context[FewShotRecipe, FewShotData, FewShotRow]


FEATURES = 100  # episodes whose classifiers are fitted at a time


def score_episodes(
    learner: Any,
    images: ImageSet,
    spec: EpisodeSpec,
    episodes: int,
    *,
    groups: Any = None,
    batch: int = 16,
    plans: Any = None,
) -> EpisodeResult:
    """Accuracy over a part's frozen episodes (`images.split` chooses them) or `plans`, in evaluation mode.

    A learner over embeddings embeds every image once (a ProtoNet unless the episodes hold fewer images than that).
    """
    seed = FROZEN_SEED[images.split]
    device = next(learner.parameters()).device
    evaluated, x = learner, images.images.to(device)
    if isinstance(learner, EmbeddingLearner) and not isinstance(learner, ProtoNet):
        evaluated, x = learner.over_features(spec.ranges[0][1]), embed(learner.module, images.images, device=device)
        batch = FEATURES
    elif isinstance(learner, ProtoNet):
        if plans is None and episodes * spec.longest > len(images):
            how: dict[str, Any] = {"distance": learner.distance, "device": device, "groups": groups}
            return few_shot_accuracy(learner.module, images, spec, episodes, seed, **how)
        evaluated = learner.clone()
        evaluated.ways = spec.ranges[0][1]  # trained with more ways than it is tested with
    plans = plans or EpisodeSampler(images.labels, spec, episodes, seed=seed, groups=groups)
    return evaluate_episodes(evaluated, x, plans, device=device, batch=batch)


def centre(learner: Any, data: FewShotData, most: int | None = None) -> None:
    """Let a classifier by features know their mean over the training images, or about `most` of them."""
    if isinstance(learner, Classifier):
        images = data.train.images
        every = 1 if most is None else max(1, len(images) // most)
        learner.find_centre(embed(learner.module, images[::every], device=learner.centre.device))


class ImageBatches(ShuffledBatches):
    """Shuffled images in place of episodes: {"query": (1, B), "query_y": (1, B)} of rows and labels, int64."""

    def __init__(self, labels: Tensor, batch_size: int, **how: Any) -> None:
        super().__init__(len(labels), batch_size, **how)
        self.labels = labels

    def iter_from(self, position: int) -> Iterator[Any]:
        """The batches of the epoch but for the first `position`."""
        for rows in super().iter_from(position):
            yield {"query": rows[None], "query_y": self.labels[rows][None]}


def settings_of(method: FewShotMethod, seed: int, machine: Machine) -> TrainSettings:
    """The training loop's settings; fp16, or a value that the loop refuses, is an InputError."""
    if machine.precision == "fp16":
        raise InputError("precision fp16 would lose small inner gradients; use fp32 or bf16")
    return method.settings(**machine.settings(method.updates, seed, method.validations))


def meta_training(context: FewShotContext) -> tuple[MetaStep, Training]:
    """Build the step of a learner, and what trains it; the weights of the best validation accuracy are kept."""
    method, recipe, data, seed, machine = context.method, context.recipe, context.data, context.seed, context.machine
    if not isinstance(method, FewShotMethod):
        raise TypeError(f"{context.name} trains nothing")
    spec = recipe.training(method, data)
    learner = build_learner(method, recipe.backbone, data, spec.ranges[0][1], seed)
    distort = method.distortion(size=data.train.image_size, channels=data.train.channels)
    turned = len(data.train.classes) * method.turns
    step = MetaStep(learner, data.train.images, distort, machine.compile, turned, method.updates)
    if not adapts(method.learner) and data.train.channels == 3 and machine.device != "cpu":
        step.to(memory_format=torch.channels_last)
    settings, groups = settings_of(method, seed, machine), recipe.groups(data.train)
    tested = recipe.tested if method.learner != SUPERVISED else EpisodeSpec(min(5, len(data.validation.classes)), 1, 5)

    def evaluate(_: int) -> dict[str, float]:
        held = data.validation
        centre(learner, data, most=4096)  # of all images it would take a fifth of the training's time
        result = score_episodes(learner, held, tested, recipe.validation_episodes, groups=recipe.groups(held))
        return {"accuracy": result.mean, "ci95": result.ci95}

    ranks: dict[str, Any] = {"rank": machine.rank, "world_size": machine.world, "seed": seed}
    fading = (method.inner_steps, round(method.fade * method.updates))
    batches: Any = (
        ImageBatches(data.train.labels, method.tasks // machine.world, **ranks)
        if method.learner == SUPERVISED
        else EpisodeStacks(data.train.labels, spec, method.tasks, groups=groups, fading=fading, **ranks)
    )
    stream = TaskStream({EPISODES: batches}, "longest", seed=seed, steps=method.updates)
    title = f"{method.learner} seed {seed}"
    if recipe.trainval:
        return step, Training(step, stream, settings, None, title)
    return step, Training(step, stream, settings, evaluate, title, keep_best="accuracy")


@dataclass(frozen=True)
class TrainedLearner:
    """The step with the learner's best weights, and what training did; a saved encoder has neither."""

    step: MetaStep | None = None
    report: TrainReport | None = None


@dataclass(frozen=True)
class FewShotExperiment(Experiment[FewShotRecipe, FewShotData, FewShotRow, TrainedLearner, EpisodeResult]):
    """A few-shot experiment: see :class:`metapretrain.experiments.base.Experiment`.

    `plans`: the test episodes; None: those that the recipe draws.
    """

    plans: Sequence[EpisodePlan] | None = None

    @property
    def files(self) -> dict[str, Any]:
        return {**self.data.train.files, **self.data.validation.files, **self.data.test.files}

    def plan(self, methods: Mapping[str, FewShotRow]) -> list[str]:
        self._check_episodes(methods)
        lines = []
        for name, method in methods.items():
            if isinstance(method, FewShotMethod):
                self.check_row(name, method)
            if isinstance(method, SavedEncoder):
                done = f"{method.tuning.steps} steps in each episode" if method.head == FINETUNE else "no training"
                lines.append(f"{_name(name, method)}: {done}, {self.recipe.test_episodes:,} test episodes")
                continue
            spec = self.recipe.training(method, self.data)
            (ways, _), (shots, _), (queries, _) = spec.ranges
            if method.learner == SUPERVISED:
                lines.append(
                    f"{name}: {method.updates:,} updates of {method.tasks} images, once for all settings; "
                    f"{self.recipe.test_episodes:,} test episodes"
                )
                continue
            start = self.recipe.pretraining(method)
            told = f"{start.updates:,} updates of {start.tasks} images" if start else ""
            before = f"after a supervised training of {told}, " * bool(told)
            passes = method.updates * method.encoder_passes(spec) + (start.updates * start.tasks if start else 0)
            lines.append(
                f"{name}: {before}{method.updates:,} updates of {method.tasks} episodes ({ways}-way {shots}-shot, "
                f"{queries} queries per class), {passes:,} encoder passes{' in all' if start else ''}; "
                f"{self.recipe.validation_episodes:,} validation and {self.recipe.test_episodes:,} test episodes"
            )
        return lines

    def check(self, methods: Mapping[str, FewShotRow], seeds: Sequence[int]) -> None:
        check_seeds(seeds)
        if told := self.lacking(methods, seeds):
            raise InputError(told)
        self._check_episodes(methods)
        for name, method in methods.items():
            self.check_row(name, method)
            for seed in seeds:
                if (self.path(_name(name, method), seed) / "config.json").is_file():
                    self.open(_name(name, method), method, seed).close()

    def _check_episodes(self, methods: Mapping[str, FewShotRow]) -> None:
        for part in (self.data.validation, self.data.test):
            EpisodeSampler(part.labels, self.recipe.tested, 1, seed=0, groups=self.recipe.groups(part))
        labels, groups = self.data.train.labels, self.recipe.groups(self.data.train)
        for name, method in methods.items():
            if isinstance(method, FewShotMethod) and method.learner != SUPERVISED:
                spec = self.recipe.training(method, self.data)
                try:
                    EpisodeStacks(labels, spec, method.tasks, seed=0, world_size=self.machine.world, groups=groups)
                except InputError as error:
                    more = " (--set shots=N queries=N are of training episodes, --queries of the scored ones)"
                    told = f"training episodes of {name}: {error}{more * ('queries' in str(error))}"
                    raise InputError(told) from None

    def context(self, name: str, method: FewShotRow, seed: int, shared: bool = False) -> FewShotContext:
        """The context of one row; that of an encoder is named after it."""
        return super().context(_name(name, method), method, seed, shared)

    def check_row(self, name: str, method: FewShotRow) -> None:
        """Refuse a value, backbone or learner, or an encoder that cannot be tested."""
        if isinstance(method, SavedEncoder):
            self._encoder(method)
            return
        spec = self.recipe.training(method, self.data)
        (_, ways), (shots, _), (queries, _) = spec.ranges
        most = min(method.inner_steps, ways * (shots + queries)) if method.batches > 1 else 1
        whole(f"batches of {name}, one for an inner step,", method.batches, 1, most)
        learner = build_learner(method, self.recipe.backbone, self.data, ways, 0)
        if method.learner == SUPERVISED:
            ImageBatches(self.data.train.labels, method.tasks // self.machine.world, seed=0)
        MetaStep(learner, self.data.train.images, compile=self.machine.compile)
        settings_of(method, 0, self.machine)

    def train(self, context: FewShotContext) -> TrainedLearner:
        """Meta-learn; the learner ends with the weights of the best validation accuracy."""
        if isinstance(context.method, SavedEncoder):
            return TrainedLearner()
        step, training = meta_training(context)
        if context.start is not None:
            state = load_tensors(context.start / LEARNER)
            if context.method.learner == SUPERVISED:
                step.learner.load_state_dict(state)
                return TrainedLearner(step.to(self.machine.device))
            body = {name.removeprefix("module."): value for name, value in state.items() if name.startswith("module.")}
            step.learner.get_submodule("module").load_state_dict(body)
        report = train(**vars(training), run=context.run)
        centre(step.learner, self.data)
        return TrainedLearner(step, report)

    def pretraining_run(self, method: FewShotRow) -> tuple[str, FewShotRow] | None:
        found = self.recipe.pretraining(method) if isinstance(method, FewShotMethod) else None
        return None if found is None else (SUPERVISED, found)

    def pretrain(self, context: FewShotContext) -> TrainedLearner:
        return self.train(context)

    def path(self, name: str, seed: int) -> Path:
        """The folder of one run; the supervised training is one for all settings of a set."""
        if name != SUPERVISED:
            return super().path(name, seed)
        return self.out / self.benchmark / f"{self._shared}-{self.recipe_name}" / f"{name}-s{seed}"

    @property
    def _shared(self) -> str:
        return f"{self.dataset.rpartition('-')[0] or self.dataset}-{SUPERVISED}"

    def whole_config(self, name: str, method: FewShotRow, seed: int) -> dict[str, Any]:
        config = super().whole_config(name, method, seed)
        if name == SUPERVISED:
            left_out = ("tested", "episodes", "within")
            config = {key: value for key, value in config.items() if key not in left_out} | {"dataset": self._shared}
            config["tested"] = {"ways": 5}
        return config

    def score(self, context: FewShotContext, trained: TrainedLearner) -> EpisodeResult:
        test, recipe = self.data.test, self.recipe
        spec, episodes, groups = recipe.tested, recipe.test_episodes, recipe.groups(test)
        if isinstance(context.method, SavedEncoder):
            model, head = self._encoder(context.method), context.method.head
            plans = self.plans or EpisodeSampler(test.labels, spec, episodes, seed=FROZEN_SEED["test"], groups=groups)
            if head == FINETUNE:
                return evaluate_finetuning(model, test.images, plans, context.method.tuning)
            centre = features_centre(model, self.data.train.images) if head == "centred" else None
            return evaluate_embeddings(kept_features(model, test.images), plans, head=head, centre=centre)
        assert trained.step is not None
        return score_episodes(trained.step.learner, test, spec, episodes, groups=groups, plans=self.plans)

    def outcome(self, context: FewShotContext, trained: TrainedLearner, scores: EpisodeResult) -> Outcome:
        metrics = {"test_accuracy": scores.mean, "test_ci95": scores.ci95, "test_sd": scores.sd}
        counts = {"counts": {**self.data.counts, "test_episodes": scores.n}}
        method, step, report = context.method, trained.step, trained.report
        if isinstance(method, SavedEncoder) or step is None:
            return Outcome(metrics, {}, {"transductive": False, **counts})
        if report is None:
            budget = {name: value for name, value in context.before.items() if name != "wall_s"}
            return Outcome(metrics, budget, {"transductive": False, **counts})
        spec = self.recipe.training(method, self.data)
        passes, rate = method.encoder_passes(spec), report.updates_per_second
        budget = {
            "encoder_passes": context.before["encoder_passes"] + report.steps * passes,
            "updates": context.before["updates"] + report.steps,
            "best_step": report.best.step if report.best.history else report.steps,
        }
        speed = {"updates_per_s": round(rate, 2), "images_per_s": round(rate * passes)}
        extra = {"transductive": is_transductive(step.learner), **speed, **counts}
        chosen = {"validation_accuracy": report.best.value} if report.best.history else {}
        return Outcome({**metrics, **chosen}, budget, extra)

    def save(self, context: FewShotContext, trained: TrainedLearner, scores: EpisodeResult) -> None:
        from safetensors.torch import save

        if trained.step is None:
            return
        state, file = trained.step.learner.state_dict(), context.folder.path / LEARNER
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        with one_line_errors(f"cannot write {LEARNER} in {file.parent}"):
            write_whole(file, save(tensors))

    def _encoder(self, method: SavedEncoder) -> SavedModel | SavedLearner:
        """An encoder that has learned from no class of the test, as far as it says, and encodes images one by one."""
        model: SavedModel | SavedLearner = load_encoder(method.name, self.machine.device)
        if isinstance(model, SavedLearner) and needs_company(model.learner):
            raise InputError(
                f"{method.name}: its encoder works inside an episode only, by batch statistics; name a run of "
                "protonet, or of another benchmark"
            )
        if method.head == FINETUNE:
            model.network()
        seen = ImageSet(torch.empty(0, 1, 1, 1, dtype=torch.uint8), torch.empty(0).long(), model.classes)
        check_disjoint({"the encoder's training": seen, "test": self.data.test})
        return model

    def config(self, method: FewShotRow) -> dict[str, Any]:
        """Return how a row is tested, its data, and how it learns."""
        data = self.data
        config: dict[str, Any] = {
            "tested": asdict(self.recipe.tested),
            "episodes": {"validation": self.recipe.validation_episodes, "test": self.recipe.test_episodes},
            "data": {"counts": data.counts, "files": self.files},
        }
        if self.recipe.within:
            config["within"] = self.recipe.within
        if self.recipe.trainval:
            config["trainval"] = True
        if isinstance(method, SavedEncoder) and method.head == FINETUNE:
            config["tuning"] = asdict(method.tuning)
        if isinstance(method, FewShotMethod):
            config |= {"choices": method.stored(), "backbone": self.recipe.backbone, "model": self.model(method)}
        return config

    def model(self, method: FewShotRow) -> dict[str, Any]:
        return describe(self.data, self.recipe.backbone, "standard", None)


def _name(name: str, method: FewShotRow) -> str:
    """The method's name in the table: that of an encoder says which run it is from."""
    if not isinstance(method, SavedEncoder):
        return name
    run = Path(method.name)
    return f"{name}-{run.resolve().name if run.exists() else re.sub('[^A-Za-z0-9._]+', '-', method.name)}"
