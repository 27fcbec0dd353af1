"""Few-shot learning on images: learners, batches of episodes, and the outer update."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import number, whole
from metapretrain.data.augment import BatchAugment
from metapretrain.data.few_shot import FewShotData
from metapretrain.distributed import mean_over_ranks
from metapretrain.draws import seeded
from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.errors import InputError, one_of
from metapretrain.graphs import own_gradients
from metapretrain.maml import MAML, POLICIES, CompiledMeta, Reptile, fading_weights
from metapretrain.maml.compiled import CompiledIfPossible
from metapretrain.maml.learner import COMPILING, seconds_saved
from metapretrain.models.encoders import build_backbone
from metapretrain.models.saved import LEARNERS, adapts, make_learner
from metapretrain.protonet.learner import HEADS
from metapretrain.protonet.prototypes import DISTANCES
from metapretrain.training import TrainSettings
from metapretrain.training.engine import with_gradients

EPISODES = "episodes"  # the stream's only task


class MetaStep(nn.Module):
    """One outer update of a learner for :func:`metapretrain.training.train`.

    The learner goes backward itself; its gradients and running statistics are averaged over the ranks and handed on.

    Args:
        learner: MAML and its variants, or ProtoNet; images: uint8 (N, C, H, W), which go where the learner goes.
        distort: changes a batch of images (B, C, H, W) at random before the learner sees them; None: nothing does.
        compile: compile the meta-step (:class:`metapretrain.maml.CompiledMeta`) of MAML and variants but Reptile;
            None: on a GPU, where that is possible and pays over `updates`.
        turned: how many classes; each image gets a random quarter turn, and the label of class and turn; 0: none does.
    """

    reduces_gradients = True
    images: Tensor

    def __init__(
        self,
        learner: nn.Module,
        images: Tensor,
        distort: nn.Module | None = None,
        compile: bool | None = False,
        turned: int = 0,
        updates: int = 0,
    ) -> None:
        super().__init__()
        self.learner, self.distort, self.turned, self.updates = learner, distort, turned, updates
        able = isinstance(learner, MAML) and not isinstance(learner, Reptile)
        self._compile = compile if able else False
        self._compiled: Any = CompiledMeta(learner).backward if self._compile else None
        self.register_buffer("images", images, persistent=False)

    def forward(self, batches: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the mean query loss of a batch of episodes, whose backward gives the meta-gradient."""
        batch = batches[EPISODES]
        parameters = [p for p in self.learner.parameters() if p.requires_grad]
        parts = [(self._shown(batch[part]), batch[f"{part}_y"]) for part in ("support", "query") if part in batch]
        if self.turned:
            parts = [quarter_turns(x, y, self.turned) for x, y in parts]
        more = {name: batch[name] for name in ("step_weights",) if name in batch}
        backward: Any = getattr(self.learner, "eager_backward", self.learner.backward)  # training records the update
        if self._compile is None:  # by the first batch
            saved = self.updates * seconds_saved(self.learner, *parts) if self.images.is_cuda else 0.0
            self._compile = saved > COMPILING
            self._compiled = partial(CompiledIfPossible(), self.learner) if self._compile else None
        backward = self._compiled or backward
        with own_gradients(parameters) as found:
            loss = backward(*parts, **more).mean()
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


def quarter_turns(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Images (T, B, C, H, H), each turned by 0 to 3 quarters at random, and labels `y + classes * quarters`."""
    quarters = torch.randint(0, 4, y.shape, device=y.device)
    turned = torch.stack([x.rot90(k, (-2, -1)) for k in range(4)])
    return turned.gather(0, quarters[None, ..., None, None, None].expand(1, *x.shape))[0], y + classes * quarters


SUPERVISED = "supervised"
FROZEN_SEED = {"validation": 1_000_003, "test": 2_000_003}  # which episodes: the same for every run


@dataclass(frozen=True)
class FewShotMethod:
    """How a method learns.

    Args:
        learner: one of :data:`metapretrain.models.saved.LEARNERS`.
        updates: outer updates; tasks: episodes per update, over all ranks, or images of `supervised`.
        lr: highest outer rate; `optimizer`, `weight_decay`, `schedule`, `warmup`, `lr_end` and `clip` as in
            :class:`metapretrain.training.TrainSettings`.
        ways: classes of a training episode of `protonet` and `r2d2`, at most all; None, and the others: as in the test.
        shots, queries: support (None: as in the test) and query images per class in training.
        inner_lr, inner_steps, test_steps, batchnorm, chunk, learn_rates: as for :class:`metapretrain.maml.MAML`.
        batches: as for :class:`metapretrain.maml.Reptile`.
        fade: share of the updates over which the losses after each inner step fade out; 0: the last alone counts.
        adapt_norms: whether the inner loop moves scales and shifts of normalisation too; `anil` moves the head alone.
        pretrained: start from the encoder of the recipe's supervised training.
        temperature, distance, learn_temperature: as for :class:`metapretrain.protonet.learner.ProtoNet`.
        turns: `supervised` tells each image's quarter turn as well, a class for each pair (Lee et al., 2020).
        head: one of :data:`metapretrain.protonet.learner.HEADS`, for `supervised`; None: the training alone.
        drop: share of units that a ResNet-12 drops, see :func:`metapretrain.models.encoders.resnet12`.
        rotate, shift: of training images at random, at most, in degrees and as a share of their size; crop: the least
            share of their area that is shown; pad, flip; jitter: of brightness, contrast and saturation (all as for
            :class:`metapretrain.data.augment.BatchAugment`).
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
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    lr_end: float = 0.0
    shots: int | None = None
    learn_rates: bool = False
    fade: float = 0.0
    pretrained: bool = False
    temperature: float = 1.0
    head: str | None = None
    drop: float = 0.0
    pad: int = 0
    flip: bool = False
    jitter: float = 0.0
    distance: str = "sqeuclidean"
    learn_temperature: bool = False
    turns: bool = False
    batches: int = 1

    def __post_init__(self) -> None:
        for name, allowed in {"learner": LEARNERS, "batchnorm": POLICIES, "distance": DISTANCES}.items():
            one_of(name, getattr(self, name), allowed)
        if self.turns and self.learner != SUPERVISED:
            told = "leave turns out, or give supervised.turns=true for the shared training"
            raise InputError(f"{self.learner} tells no turns: {told}")
        if self.head is not None:
            one_of("head", self.head, HEADS)
        number("inner_lr", self.inner_lr, above=0)
        number("fade", self.fade, least=0, most=1)
        number("temperature", self.temperature, above=0)
        number("drop", self.drop, least=0, below=1)
        for name in "updates tasks queries inner_steps test_steps validations ways chunk shots batches".split():
            if (value := getattr(self, name)) is not None:
                whole(name, value, 2 if name == "ways" else 1)
        if self.fade and (self.learner == "reptile" or not adapts(self.learner)):
            raise InputError(f"{self.learner} has no loss between its steps: give fade=0, or take maml")
        if self.drop and adapts(self.learner):
            raise InputError(f"{self.learner} adapts weights, which takes no DropBlock: give drop=0 or take protonet")
        if self.learn_rates and self.learner in ("metasgd", "reptile"):
            raise InputError(f"{self.learner} learns no rates by step: give learn_rates=false, or take maml")
        if self.batches > 1 and self.learner != "reptile":
            raise InputError(f"{self.learner} takes the whole support in each step: give batches=1, or take reptile")
        self.settings()
        self.distortion(size=1, channels=1)

    @property
    def pretraining(self) -> str | None:
        """The training that this row starts from, and shares with others."""
        return SUPERVISED if self.pretrained or self.head is not None else None

    def settings(self, **how: Any) -> TrainSettings:
        """The training loop's settings."""
        names = ("lr", "optimizer", "weight_decay", "schedule", "warmup", "clip", "lr_end")
        return TrainSettings(self.updates, **{name: getattr(self, name) for name in names}, **how)

    def stored(self) -> dict[str, Any]:
        """The choices that a run's configuration keeps: newer ones only where they are not the default."""
        newer = fields(self)[[field.name for field in fields(self)].index("optimizer") :]
        left_out = {field.name for field in newer if getattr(self, field.name) == field.default}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def distortion(self, *, size: int, channels: int) -> BatchAugment | None:
        """What distorts training images, each by itself; its images are float, still 0..255. None if nothing does."""
        crop = None if self.crop == 1 else (self.crop, 1.0)
        chosen = {name: getattr(self, name) for name in ("rotate", "shift", "pad", "flip")}
        if not (crop or self.jitter or any(chosen.values())):
            return None
        colour = (self.jitter, self.jitter, self.jitter, 0.0) if self.jitter else None
        mean, std = (0.0,) * channels, (1 / 255,) * channels
        return BatchAugment(size, crop_scale=crop, color_jitter=colour, mean=mean, std=std, **chosen)

    def spec(self, tested: EpisodeSpec, classes: int) -> EpisodeSpec:
        """The training episodes: as tested, but for their ways and queries."""
        ways = self.ways if not adapts(self.learner) else None  # a head has as many outputs as it is tested with
        return EpisodeSpec(min(ways or tested.ranges[0][1], classes), self.shots or tested.shots, self.queries)

    def encoder_passes(self, spec: EpisodeSpec) -> int:
        """Images that an update takes through the backbone, on average, forward and backward as one."""
        (ways, _), (shots, _), (queries, _) = spec.ranges
        if self.learner == SUPERVISED:
            return self.tasks
        if not adapts(self.learner):
            return self.tasks * ways * (shots + queries)
        learned = shots + queries * (self.learner == "reptile")
        looks = 1 + self.fade * (self.inner_steps - 1)
        return round(self.tasks * ways * (learned * self.inner_steps / self.batches + queries * looks))


def build_learner(method: FewShotMethod, backbone: str, data: FewShotData, ways: int, seed: int) -> Any:
    """Return a learner whose first weights are a function of `seed`; `ways` are those of training episodes.

    DropBlock grows over the first two thirds of the updates, as MetaOptNet's does.
    """
    about: dict[str, Any] = {"channels": data.train.channels, "image_size": data.train.image_size}
    about |= {"mean": data.mean, "std": data.std, "drop": method.drop, "ramp": max(1, method.updates * 2 // 3)}
    with seeded(seed):
        net = build_backbone(backbone, ways=ways if adapts(method.learner) else None, **about)
        classes = len(data.train.classes) if method.learner == SUPERVISED else ways
        return make_learner(asdict(method), net, classes)


class EpisodeStacks:
    """Rows and labels of `tasks` episodes at a time, stacked in the sampler's order; this rank's part of them.

    Yields {"support": (T, S), "query": (T, Q), "support_y": (T, S), "query_y": (T, Q)}, int64, without end. Batch i
    is a function of (seed, i); over all ranks it holds the episodes of the one-process batch.
    `fading` (steps, updates): "step_weights" (steps,) of :func:`metapretrain.maml.fading_weights` as well, as long as
    the losses after each inner step fade out. `options`: seed, groups, rank and world_size of the sampler.
    InputError: `tasks` does not divide by the number of ranks, or the labels do not fit `spec`.
    """

    def __init__(
        self, labels: Tensor, spec: EpisodeSpec, tasks: int, *, fading: tuple[int, int] = (0, 0), **options: Any
    ) -> None:
        self.fading, self.sampler = fading, EpisodeSampler(labels, spec, None, **options)
        if tasks % self.sampler.world_size:
            raise InputError(f"tasks={tasks} must be a multiple of the {self.sampler.world_size} processes")
        self.tasks = tasks // self.sampler.world_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[dict[str, Tensor]]:
        plans = self.sampler.iter_from(position * self.tasks)
        while group := list(islice(plans, self.tasks)):
            batch = {name: torch.stack([getattr(plan, name) for plan in group]) for name in ("support_y", "query_y")}
            batch["support"], batch["query"] = torch.tensor(group).tensor_split([batch["support_y"].shape[1]], 1)
            steps, updates = self.fading
            if position < updates:
                batch["step_weights"] = fading_weights(steps, position / updates)
            position += 1
            yield batch
