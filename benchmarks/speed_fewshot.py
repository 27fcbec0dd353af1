"""Rows of run_speed.py about few-shot learning on CIFAR-FS's shape: training by episodes, and scoring kept features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock, engine_of, here, wait
from torch import Tensor, nn

from metapretrain.episodes import EpisodeSampler, EpisodeSpec

CLASSES, HELD_OUT, IMAGES, SIZE = 64, 20, 600, 32
FEATURES, EPISODES = 640, 2_000  # of ResNet-12; scored at once


def training(backbone: str) -> list[Contender]:
    """Updates of the recipes on photographs, from planning to optimizer: ProtoNet by episodes, and plain training.

    Random images; fewer of them per update on a CPU.
    """

    def contender(name: str, method: str, ours: bool) -> Contender:
        run, images = updates(backbone, method)
        return Contender(name, run, ours, device_clock(), each=images)

    return [
        contender("ProtoNet by episodes", "protonet", True),
        contender("plain training of a classifier", "supervised-centroid", False),
    ]


def updates(backbone: str, name: str) -> tuple[Callable[[], Callable[[int], None]], int]:
    """What makes a function of n, which does n updates of a row of run_fewshot.py; and the images of one update."""
    from fewshot_experiment import FewShotRecipe, ImageBatches
    from fewshot_learning import EPISODES as STREAM
    from fewshot_learning import SUPERVISED, EpisodeStacks, MetaStep, build_learner
    from run_fewshot import methods_of

    from metapretrain.data.few_shot import PARTS, FewShotData
    from metapretrain.data.images import ImageSet
    from metapretrain.episodes import TaskStream
    from metapretrain.training.environment import make_accelerator

    method = methods_of(5, True, backbone, SIZE)[name]
    plain = method.learner == SUPERVISED
    if not torch.cuda.is_available():
        method = replace(method, tasks=80) if plain else replace(method, ways=5, tasks=1)
    labels = torch.arange(CLASSES).repeat_interleave(here(40, IMAGES))
    images = torch.randint(0, 256, (len(labels), 3, SIZE, SIZE), dtype=torch.uint8)
    data = FewShotData.of(
        {part: ImageSet(images, labels, [f"{part} {n}" for n in range(CLASSES)], "made", part) for part in PARTS}
    )
    spec = FewShotRecipe(EpisodeSpec(5, 1, 15), backbone).training(method, data)

    def make() -> Callable[[int], None]:
        learner = build_learner(method, backbone, data, spec.ranges[0][1], 0)
        step = MetaStep(learner, images, method.distortion(size=SIZE, channels=3))
        if torch.cuda.is_available():
            step.to(memory_format=torch.channels_last)
        engine = engine_of(step, make_accelerator("auto", "fp32"), method.settings(seed=0))
        batches: Any = (
            ImageBatches(labels, method.tasks, seed=0) if plain else EpisodeStacks(labels, spec, method.tasks, seed=0)
        )
        stream = iter(TaskStream({STREAM: batches}, "longest", seed=0, steps=10**9))

        def calls(n: int) -> None:
            for _ in range(n):
                engine.update([next(stream)])
            wait()

        calls(here(1, 8))  # recording is not timed
        return calls

    return make, method.encoder_passes(spec)


def scoring(shots: int) -> list[Contender]:
    """Accuracy of 2,000 5-way episodes, 15 queries per class, from random features of 20 classes, by each head."""
    from metapretrain.evaluation.episodes import evaluate_embeddings
    from metapretrain.protonet.learner import HEADS

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(HELD_OUT).repeat_interleave(IMAGES)
    means, noise = (torch.randn(rows, FEATURES, generator=generator) for rows in (HELD_OUT, len(labels)))
    z = means[labels] + 4 * noise

    def episodes(count: int) -> EpisodeSampler:
        return EpisodeSampler(labels, EpisodeSpec(5, shots, 15), count, seed=0)

    def repeated(call: Callable[[], object]) -> Callable[[int], None]:
        def calls(n: int) -> None:
            for _ in range(n):
                call()

        return calls

    def by(head: str) -> Callable[[], object]:
        centre = z.mean(0) if head == "centred" else None
        return lambda: evaluate_embeddings(z, episodes(EPISODES), head=head, centre=centre)

    def contender(name: str, make: Callable[[], Callable[[], object]], ours: bool) -> Contender:
        return Contender(name, lambda: repeated(make()), ours, device_clock(), each=EPISODES)

    return [
        *(contender(f"head {head}", functools.partial(by, head), True) for head in HEADS),
        contender("easyfsl PrototypicalNetworks", lambda: easyfsl(z, episodes(EPISODES)), False),
    ]


def easyfsl(z: Tensor, plans: EpisodeSampler) -> Callable[[], float]:
    """What computes the mean accuracy by its prototypes, which take one episode at a time; the episodes are ours."""
    try:
        from easyfsl.methods import PrototypicalNetworks
    except ImportError:
        raise Missing("easyfsl (pip install easyfsl)") from None
    network = PrototypicalNetworks(nn.Identity()).eval()

    @torch.no_grad()
    def accuracy() -> float:
        right = []
        for plan in plans:
            network.process_support_set(z[plan.support], plan.support_y)
            right.append((network(z[plan.query]).argmax(1) == plan.query_y).float().mean())
        return float(torch.stack(right).mean())

    return accuracy
