"""Few-shot learning on images: learners, batches of episodes, the outer update, and training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import number, whole
from metapretrain.data.augment import BatchAugment
from metapretrain.data.few_shot import FewShotData
from metapretrain.data.images import ImageSet
from metapretrain.distributed import mean_over_ranks
from metapretrain.draws import seeded
from metapretrain.episodes import EpisodeSampler, EpisodeSpec, TaskStream
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.episodes import EpisodeResult, evaluate_episodes, few_shot_accuracy
from metapretrain.experiments.base import Context, Machine, Training
from metapretrain.graphs import own_gradients
from metapretrain.maml import MAML, POLICIES, CompiledMeta
from metapretrain.models.encoders import build_backbone
from metapretrain.models.saved import KINDS, make_learner
from metapretrain.protonet.learner import ProtoNet
from metapretrain.training import TrainSettings
from metapretrain.training.engine import with_gradients

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


EPISODES = "episodes"  # the stream's only task


class MetaStep(nn.Module):
    """One outer update of a learner for :func:`metapretrain.training.train`.

    The learner goes backward itself, chunk by chunk; its gradients, and running statistics, are averaged over the
    ranks. The loss that is returned only hands these gradients on.

    Args:
        learner: MAML and its kin, or ProtoNet; images: uint8 (N, C, H, W), which go where the learner goes.
        distort: changes a batch of images (B, C, H, W) at random before the learner sees them; None: nothing does.
        compile: compile the meta-step (:class:`metapretrain.maml.CompiledMeta`); a ProtoNet stays as it is.
    """

    reduces_gradients = True
    images: Tensor

    def __init__(
        self, learner: nn.Module, images: Tensor, distort: nn.Module | None = None, compile: bool = False
    ) -> None:
        super().__init__()
        self.learner, self.distort = learner, distort
        self._compiled = CompiledMeta(learner) if compile and isinstance(learner, MAML) else None
        self.register_buffer("images", images, persistent=False)

    def forward(self, batches: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the mean query loss of a batch of episodes, whose backward gives the meta-gradient."""
        batch = batches[EPISODES]
        parameters = [p for p in self.learner.parameters() if p.requires_grad]
        support, query = ((self._shown(batch[part]), batch[f"{part}_y"]) for part in ("support", "query"))
        meta: Any = self.learner if self._compiled is None else self._compiled
        with own_gradients(parameters) as found:
            loss = meta.backward(support, query).mean()
        gradients = [grad for grad in found if grad is not None]
        statistics = [b for b in self.learner.buffers() if b.is_floating_point()]
        with torch.no_grad():
            for tensor, mean in zip(changed := [loss, *gradients, *statistics], mean_over_ranks(changed), strict=True):
                tensor.copy_(mean)
        return {EPISODES: with_gradients(loss, found, parameters)}

    def _shown(self, rows: Tensor) -> Tensor:
        if self.distort is None:
            return self.images[rows]
        distorted: Tensor = self.distort(self.images[rows.flatten()])
        return distorted.view(*rows.shape, *distorted.shape[1:])


LEARNERS = ("protonet", "maml", "fomaml", "anil", "metasgd")
FROZEN_SEED = {"validation": 1_000_003, "test": 2_000_003}  # which episodes: the same for every run


@dataclass(frozen=True)
class FewShotMethod:
    """How a method learns.

    Args:
        learner: one of `LEARNERS`; updates: outer updates; tasks: episodes an update, over all ranks.
        lr: outer rate of Adam; `schedule` and `warmup` as in :class:`metapretrain.training.TrainSettings`.
        ways: classes of a training episode of `protonet`, at most all; None, and the others: as many as in the test.
        queries: query images a class in training.
        inner_lr, inner_steps, test_steps, batchnorm, chunk: as for :class:`metapretrain.maml.MAML`.
        adapt_norms: whether the inner loop moves scales and shifts of normalisation too; `anil` moves the head alone.
        rotate, shift: of training images at random, at most, in degrees and as a share of their size; crop: the least
            share of their area that is shown (all as for :class:`metapretrain.data.augment.BatchAugment`).
        validations: how often the validation episodes are scored; the best time gives the weights.
    """

    learner: str
    updates: int
    tasks: int
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup: float = 0.0
    clip: float | None = None
    ways: int | None = None
    queries: int = 5
    inner_lr: float = 0.4
    inner_steps: int = 1
    test_steps: int = 1
    batchnorm: str = "batch"
    adapt_norms: bool = True
    chunk: int | None = None
    rotate: float = 0.0
    shift: float = 0.0
    crop: float = 1.0
    validations: int = 20

    def __post_init__(self) -> None:
        one_of("learner", self.learner, LEARNERS)
        one_of("batchnorm", self.batchnorm, POLICIES)
        number("inner_lr", self.inner_lr, above=0)
        for name in ("updates", "tasks", "queries", "inner_steps", "test_steps", "validations", "ways", "chunk"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, 1)
        TrainSettings(self.updates, self.lr, schedule=self.schedule, warmup=self.warmup, clip=self.clip)  # its checks
        self.distortion(size=1, channels=1)

    def distortion(self, *, size: int, channels: int) -> BatchAugment | None:
        """What distorts training images, each by itself; its images are float, still 0..255. None if nothing does."""
        if not (self.rotate or self.shift or self.crop != 1):
            return None
        crop = None if self.crop == 1 else (self.crop, 1.0)
        mean, std = (0.0,) * channels, (1 / 255,) * channels
        return BatchAugment(size, crop_scale=crop, rotate=self.rotate, shift=self.shift, mean=mean, std=std)

    def spec(self, tested: EpisodeSpec, classes: int) -> EpisodeSpec:
        """The training episodes: as tested, but for their ways and queries."""
        ways = self.ways if self.learner == "protonet" else None  # a head has as many outputs as it is tested with
        return EpisodeSpec(min(ways or tested.ranges[0][1], classes), tested.shots, self.queries)

    def encoder_passes(self, spec: EpisodeSpec) -> int:
        """Images that an update takes through the backbone, forward and backward as one."""
        (ways, _), (shots, _), (queries, _) = spec.ranges
        return self.tasks * ways * (shots * (1 if self.learner == "protonet" else self.inner_steps) + queries)


@dataclass(frozen=True)
class SavedEncoder:
    """The row of an encoder that another benchmark has trained: its features, nearest support prototype."""

    run: Path


@dataclass(frozen=True)
class FewShotRecipe:
    """How all rows of a few-shot table are tested, and their backbone.

    Args:
        tested: ways, shots and queries of validation and test episodes.
        backbone: see :data:`metapretrain.models.encoders.BACKBONES`.
        test_episodes, validation_episodes: how many, the same ones for every run.
        within: one of :data:`WITHIN`, or "" for episodes of any classes.
    """

    tested: EpisodeSpec
    backbone: str
    test_episodes: int = 600
    validation_episodes: int = 200
    within: str = ""

    def __post_init__(self) -> None:
        if self.within:
            one_of("within", self.within, WITHIN)

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


FewShotContext = Context[FewShotRecipe, FewShotData, "FewShotMethod | SavedEncoder"]


def build_learner(method: FewShotMethod, backbone: str, data: FewShotData, ways: int, seed: int) -> Any:
    """Return a learner whose first weights are a function of `seed`; `ways` are those of training episodes."""
    with seeded(seed):
        net = build_backbone(
            backbone,
            ways=ways if method.learner in KINDS else None,
            channels=data.train.channels,
            image_size=data.train.image_size,
            mean=data.mean,
            std=data.std,
        )
    return make_learner(asdict(method), net, ways)


class EpisodeStacks:
    """Rows and labels of `tasks` episodes at a time, stacked in the sampler's order; this rank's part of them.

    Yields {"support": (T, S), "query": (T, Q), "support_y": (T, S), "query_y": (T, Q)}, int64, without end. Batch i
    is a function of (seed, i); over all ranks it holds the episodes of the one-process batch.
    InputError: `tasks` does not divide by the number of ranks, or the labels do not fit `spec`.

    Example:
        >>> batches = EpisodeStacks(torch.tensor([0, 0, 1, 1]), EpisodeSpec(2, 1, 1), 3, seed=0)
        >>> next(iter(batches))["support"].shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        labels: Tensor,
        spec: EpisodeSpec,
        tasks: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        groups: Any = None,
    ) -> None:
        if tasks % world_size:
            raise InputError(f"tasks={tasks} must be a multiple of the {world_size} processes")
        self.tasks = tasks // world_size
        ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self.sampler = EpisodeSampler(labels, spec, None, seed=seed, groups=groups, **ranks)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[dict[str, Tensor]]:
        plans = self.sampler.iter_from(position * self.tasks)
        while group := list(islice(plans, self.tasks)):
            rows = torch.tensor(group)
            support_y = torch.stack([plan.support_y for plan in group])
            query_y = torch.stack([plan.query_y for plan in group])
            shots = support_y.shape[1]
            yield {"support": rows[:, :shots], "query": rows[:, shots:], "support_y": support_y, "query_y": query_y}


def score_episodes(
    learner: Any, images: ImageSet, spec: EpisodeSpec, episodes: int, *, groups: Any = None, batch: int = 16
) -> EpisodeResult:
    """Accuracy over a part's frozen episodes (`images.split` chooses them), in evaluation mode.

    A ProtoNet embeds every image once, unless the episodes hold fewer images than that.
    """
    seed = FROZEN_SEED[images.split]
    device = next(learner.parameters()).device
    evaluated = learner
    if isinstance(learner, ProtoNet):
        if episodes * spec.longest > len(images):
            how: dict[str, Any] = {"distance": learner.distance, "device": device, "groups": groups}
            return few_shot_accuracy(learner.module, images, spec, episodes, seed, **how)
        evaluated = learner.clone()
        evaluated.ways = spec.ranges[0][1]  # trained with more ways than it is tested with
    sampler = EpisodeSampler(images.labels, spec, episodes, seed=seed, groups=groups)
    return evaluate_episodes(evaluated, images.images.to(device), sampler, device=device, batch=batch)


def settings_of(method: FewShotMethod, seed: int, machine: Machine) -> TrainSettings:
    """The training loop's settings; fp16, or a value that the loop refuses, is an InputError."""
    if machine.precision == "fp16":
        raise InputError("precision fp16 would lose small inner gradients; use fp32 or bf16")
    return TrainSettings(
        steps=method.updates,
        lr=method.lr,
        optimizer="adamw",
        weight_decay=0.0,
        schedule=method.schedule,
        warmup=method.warmup,
        clip=method.clip,
        **machine.settings(method.updates, seed, method.validations),
    )


def meta_training(context: FewShotContext) -> tuple[MetaStep, Training]:
    """Build the step of a learner, and what trains it; the weights of the best validation accuracy are kept."""
    method, recipe, data, seed, machine = context.method, context.recipe, context.data, context.seed, context.machine
    if not isinstance(method, FewShotMethod):
        raise TypeError(f"{context.name} trains nothing")
    spec = recipe.training(method, data)
    learner = build_learner(method, recipe.backbone, data, spec.ranges[0][1], seed)
    distort = method.distortion(size=data.train.image_size, channels=data.train.channels)
    step = MetaStep(learner, data.train.images, distort, machine.compile)

    def evaluate(_: int) -> dict[str, float]:
        groups = recipe.groups(data.validation)
        result = score_episodes(learner, data.validation, recipe.tested, recipe.validation_episodes, groups=groups)
        return {"accuracy": result.mean, "ci95": result.ci95}

    settings = settings_of(method, seed, machine)
    ranks: dict[str, Any] = {"rank": machine.rank, "world_size": machine.world}
    batches = EpisodeStacks(data.train.labels, spec, method.tasks, seed=seed, groups=recipe.groups(data.train), **ranks)
    stream = TaskStream({EPISODES: batches}, "longest", seed=seed, steps=method.updates)
    title = f"{method.learner} seed {seed}"
    return step, Training(step, stream, settings, evaluate, title, keep_best="accuracy")
