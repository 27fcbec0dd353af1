"""Rows of run_speed.py about images: augmenting a batch, and a whole training step of a ResNet-18."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock, wait
from torch import Tensor, nn

from metapretrain.data.augment import AUGMENTATIONS, make_augmentation
from metapretrain.data.images import ImageSet

BATCH, CPU_TRAIN_BATCH, SIZE = 128, 32, 96
MEAN, STD = (0.45, 0.44, 0.40), (0.26, 0.26, 0.27)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def random_images(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)


def on_cuda() -> None:
    if not torch.cuda.is_available():
        raise Missing("a CUDA GPU")


def repeated(call: Callable[[], object]) -> Callable[[int], None]:
    """A function of n: n calls, then one wait for the GPU."""

    def calls(n: int) -> None:
        for _ in repeat(None, n):
            call()
        wait()

    calls(3)  # lazy set-up and autotuning are not timed
    return calls


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The call as one launch."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def augmentation(preset: str) -> list[Contender]:
    """Augment a batch of 128 x 3 x 96 x 96 uint8, each image with parameters of its own."""

    def ours(how: str) -> Callable[[], Callable[[int], None]]:
        def make() -> Callable[[int], None]:
            if how:
                on_cuda()
            module: Any = make_augmentation(preset, SIZE, 3, MEAN, STD).to(device())
            images = random_images(BATCH).to(device())
            if "compiled" in how:
                module.compile()
                module(images)

            def call() -> object:
                return module(images)

            return repeated(recorded(call) if "graph" in how else call)

        return make

    def torchvision() -> Callable[[int], None]:
        transform, images = torchvision_transform(preset), random_images(BATCH).to(device())
        return repeated(lambda: torch.stack([transform(image) for image in images]))

    def kornia() -> Callable[[int], None]:
        transform, images = kornia_transform(preset).to(device()), random_images(BATCH).to(device())
        return repeated(lambda: transform(images.float() / 255))

    def contender(name: str, make: Callable[[], Callable[[int], None]], ours: bool = False) -> Contender:
        return Contender(name, make, ours, device_clock(), each=BATCH, count=True)

    return [
        contender("BatchAugment", ours(""), ours=True),
        contender("BatchAugment, CUDA graph", ours("graph"), ours=True),
        contender("BatchAugment, compiled", ours("compiled"), ours=True),
        contender("BatchAugment, compiled, CUDA graph", ours("compiled, graph"), ours=True),
        contender("torchvision v2, image by image", torchvision),
        contender("kornia", kornia),
    ]


def torchvision_transform(preset: str) -> Any:
    """The preset in torchvision's transforms."""
    from torchvision.transforms import v2

    chosen = AUGMENTATIONS[preset]
    steps: list[Any] = [v2.RandomResizedCrop(SIZE, chosen["crop_scale"], antialias=False), v2.RandomHorizontalFlip()]
    if "color_jitter" in chosen:
        steps.append(v2.RandomApply([v2.ColorJitter(*chosen["color_jitter"])], chosen.get("jitter_prob", 1.0)))
        steps.append(v2.RandomGrayscale(chosen["grayscale_prob"]))
    if "blur_prob" in chosen:
        steps.append(v2.RandomApply([v2.GaussianBlur(9, (0.1, 2.0))], chosen["blur_prob"]))
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    if "cutout" in chosen:
        steps.append(v2.RandomErasing(1.0, (1 / 9, 1 / 9), (1.0, 1.0)))
    return v2.Compose(steps)


def kornia_transform(preset: str) -> nn.Module:
    """The preset in kornia's augmentations; they take floats 0..1."""
    try:
        from kornia import augmentation as k
    except ImportError:
        raise Missing("kornia (pip install kornia)") from None
    chosen = AUGMENTATIONS[preset]
    steps: list[Any] = [k.RandomResizedCrop((SIZE, SIZE), chosen["crop_scale"]), k.RandomHorizontalFlip()]
    if "color_jitter" in chosen:
        steps.append(k.ColorJitter(*chosen["color_jitter"], p=chosen.get("jitter_prob", 1.0)))
        steps.append(k.RandomGrayscale(p=chosen["grayscale_prob"]))
    if "blur_prob" in chosen:
        steps.append(k.RandomGaussianBlur((9, 9), (0.1, 2.0), p=chosen["blur_prob"]))
    steps.append(k.Normalize(torch.tensor(MEAN), torch.tensor(STD)))
    if "cutout" in chosen:
        steps.append(k.RandomErasing((1 / 9, 1 / 9), (1.0, 1.0), p=1.0))
    return nn.Sequential(*steps)


def training() -> list[Contender]:
    """A supervised step of ResNet-18 at 96 pixels, augmentation "strong" on the device (bf16 on a GPU)."""
    batch = BATCH if torch.cuda.is_available() else CPU_TRAIN_BATCH

    def contender(name: str, compiled: bool, graph: bool, ours: bool = True) -> Contender:
        def make() -> Callable[[int], None]:
            if compiled or graph:
                on_cuda()
            return training_steps(batch, compiled, graph)

        return Contender(name, make, ours, device_clock(), each=batch)

    return [
        contender("kernel by kernel", compiled=False, graph=False, ours=False),
        contender("CUDA graph", compiled=False, graph=True),
        contender("compiled", compiled=True, graph=False),
        contender("compiled, CUDA graph", compiled=True, graph=True),
    ]


def training_steps(batch: int, compiled: bool, graph: bool) -> Callable[[int], None]:
    """Updates by the engine of the training loop, batches drawn as it draws them."""
    from metapretrain.episodes import ShuffledBatches, TaskStream
    from metapretrain.experiments.images.data import Images
    from metapretrain.experiments.images.objectives import ImageStep, Supervised
    from metapretrain.models import build_encoder, build_head
    from metapretrain.training import TrainSettings
    from metapretrain.training.engine import WARMUP_UPDATES, Engine, build_optimizer
    from metapretrain.training.environment import compile_parts, make_accelerator

    cuda = torch.cuda.is_available()
    images = random_images(5000)
    data = ImageSet(images, torch.arange(5000) % 10, [str(c) for c in range(10)], "random", "train")
    augment = make_augmentation("strong", SIZE, 3, MEAN, STD, channels_last=cuda)
    encoder = build_encoder("resnet18", channels=3, image_size=SIZE)
    task = Supervised(Images(data, augment), build_head("linear", encoder.features, 10))
    step = ImageStep(encoder.to(memory_format=torch.channels_last) if cuda else encoder, {"supervised": task})
    settings = TrainSettings(steps=1, lr=0.01, precision="bf16" if cuda else "fp32", cuda_graph=graph)
    accelerator = make_accelerator("auto", settings.precision)
    step.to(accelerator.device)
    if compiled:
        compile_parts(step)
    module, optimizer = accelerator.prepare(step, build_optimizer(step, settings, accelerator.device))
    engine = Engine(module, optimizer, accelerator, settings)
    batches = iter(TaskStream({"supervised": ShuffledBatches(5000, batch, seed=0)}, "longest", seed=0, steps=10**9))
    module.train()

    def updates(n: int) -> None:
        for _ in range(n):
            engine.set_rate(lambda peak: 0.01)
            engine.update([next(batches)])
        wait()

    updates(WARMUP_UPDATES + 2 if cuda else 1)
    return updates
