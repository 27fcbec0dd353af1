"""Rows of run_speed.py about episodes and prototypes: planning, loading, and the prototypical loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from speed_contenders import Contender, Missing
from torch.nn.functional import cross_entropy

from metapretrain.episodes import EpisodeLoader, EpisodeSampler, EpisodeSpec
from metapretrain.episodes.sampler import BLOCK, Planner, read_groups, read_labels
from metapretrain.protonet import ProtoLoss


def drain(iterable: Iterable[Any], n: int) -> None:
    for _ in islice(iterable, n):
        pass


def planning(classes: int, rows_a_class: int) -> list[Contender]:
    """5-way episodes of 1 shot and 15 queries: plans as iterated, and learn2learn's task descriptions."""
    labels = np.repeat(np.arange(classes), rows_a_class)

    def ours() -> Callable[[int], None]:
        plans = iter(EpisodeSampler(labels, EpisodeSpec(5, 1, 15), None, seed=0))
        return lambda n: drain(plans, n)

    def arrays_only() -> Callable[[int], None]:
        read = read_labels(labels)
        groups = read_groups(None, len(labels))
        planner = Planner(read, groups, EpisodeSpec(5, 1, 15), seed=0, block_size=BLOCK)

        def plan_blocks(n: int) -> None:
            for block in range(-(-n // planner.block_size)):
                planner.block(0, block)

        return plan_blocks

    def learn2learn(separate: bool) -> Callable[[], Callable[[int], None]]:
        def make() -> Callable[[int], None]:
            dataset, transforms = learn2learn_dataset(labels)
            ways_and_shots = (
                [transforms.NWays(dataset, n=5), transforms.KShots(dataset, k=16)]
                if separate
                else [transforms.FusedNWaysKShots(dataset, n=5, k=16)]
            )
            tasks = taskset(dataset, ways_and_shots)
            return lambda n: drain(iter(tasks.sample_task_description, None), n)

        return make

    return [
        Contender("EpisodeSampler, plans iterated", ours, ours=True),
        Contender("EpisodeSampler, blocks of arrays only", arrays_only, ours=True),
        Contender("learn2learn NWays + KShots", learn2learn(separate=True)),
        Contender("learn2learn FusedNWaysKShots", learn2learn(separate=False)),
    ]


def learn2learn_dataset(labels: np.ndarray) -> tuple[Any, Any]:
    try:
        import learn2learn
    except ImportError:
        raise Missing("learn2learn (installed by `make`, see the README)") from None
    data = torch.utils.data.TensorDataset(torch.zeros(len(labels), 1), torch.from_numpy(labels))
    by_index = dict(enumerate(labels.tolist()))
    return learn2learn.data.MetaDataset(data, indices_to_labels=by_index), learn2learn.data.transforms


def taskset(dataset: Any, transforms: list[Any]) -> Any:
    """learn2learn's stream of tasks; :func:`learn2learn_dataset` has said whether it is there."""
    import learn2learn

    return learn2learn.data.Taskset(dataset, transforms)


def loading(classes: int, rows_a_class: int) -> list[Contender]:
    """5-way episodes of 16 each out of 28x28 images in memory, in this process."""
    labels = np.repeat(np.arange(classes), rows_a_class)
    images = torch.zeros(len(labels), 1, 28, 28)

    def ours() -> Callable[[int], None]:
        episodes = iter(EpisodeLoader(images, EpisodeSampler(labels, EpisodeSpec(5, 1, 15), None, seed=0)))
        return lambda n: drain(episodes, n)

    def ours_by_item() -> Callable[[int], None]:
        data = torch.utils.data.TensorDataset(images, torch.from_numpy(labels))
        episodes = iter(EpisodeLoader(data, EpisodeSampler(labels, EpisodeSpec(5, 1, 15), None, seed=0)))
        return lambda n: drain(episodes, n)

    def learn2learn() -> Callable[[int], None]:
        dataset, transforms = learn2learn_dataset(labels)
        dataset.dataset = torch.utils.data.TensorDataset(images, torch.from_numpy(labels))
        steps = [transforms.FusedNWaysKShots(dataset, n=5, k=16), transforms.LoadData(dataset)]
        tasks = taskset(dataset, [*steps, transforms.RemapLabels(dataset)])
        return lambda n: drain(tasks, n)

    return [
        Contender("EpisodeLoader of a tensor", ours, ours=True),
        Contender("EpisodeLoader of a TensorDataset", ours_by_item, ours=True),
        Contender("learn2learn Taskset with LoadData", learn2learn),
    ]


def prototypical() -> list[Contender]:
    """Loss and gradient of 128 embeddings of 512 numbers, 10 classes."""
    z = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.arange(128) % 10

    def steps(loss: Callable[[Any, Any], Any]) -> Callable[[int], None]:
        def run(n: int) -> None:
            for _ in range(n):
                z.grad = None
                loss(z, y).backward()

        return run

    def easyfsl() -> Callable[[int], None]:
        try:
            from easyfsl.methods import PrototypicalNetworks
        except ImportError:
            raise Missing("easyfsl (pip install easyfsl)") from None
        network = PrototypicalNetworks(torch.nn.Identity())

        def loss(z: Any, y: Any) -> Any:
            network.process_support_set(z, y)
            return cross_entropy(network(z), y)

        return steps(loss)

    def learn2learn() -> Callable[[int], None]:
        try:
            from learn2learn.nn import PrototypicalClassifier
        except ImportError:
            raise Missing("learn2learn (installed by `make`, see the README)") from None
        return steps(lambda z, y: cross_entropy(PrototypicalClassifier(z, y)(z), y))

    return [
        Contender("ProtoLoss", lambda: steps(ProtoLoss(num_classes=10)), ours=True),
        Contender("ProtoLoss, any labels", lambda: steps(ProtoLoss()), ours=True),
        Contender("ProtoLoss, query mode", lambda: steps(ProtoLoss("query", num_classes=10)), ours=True),
        Contender("easyfsl PrototypicalNetworks", easyfsl),
        Contender("learn2learn PrototypicalClassifier (squared)", learn2learn),
    ]
