"""Image encoders, the backbones of few-shot learning, and heads over features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.checks import number, require, whole
from metapretrain.data.images import normalisation
from metapretrain.errors import InputError, one_of

HEADS = ("linear", "mlp")


def build_head(name: str, features: int, classes: int) -> nn.Module:
    """Build a head, features `(B, D)` to logits `(B, C)`: `linear`, or `mlp` with one hidden ReLU layer as wide as D.

    Example:
        >>> build_head("linear", 512, 10)
        Linear(in_features=512, out_features=10, bias=True)
    """
    if one_of("head", name, HEADS) == "linear":
        return nn.Linear(features, classes)
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, classes))


def projection(features: int, size: int = 128) -> nn.Module:
    """SimCLR's projection head: one hidden ReLU layer, `size` outputs (Chen et al., 2020, section 4.2).

    Example:
        >>> projection(512)[-1]
        Linear(in_features=512, out_features=128, bias=True)
    """
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, size))


STEMS = ("standard", "3x3")


class Encoder(nn.Module):
    """A backbone that maps images `(B, C, H, W)` to features `(B, D)`; D is `features`. See :func:`build_encoder`."""

    compilable = True  # the training loop compiles such modules when asked to

    def __init__(self, backbone: nn.Module, features: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.backbone(x)
        return z


class Frozen(nn.Module):
    """An encoder that takes no gradient and whose BatchNorm stays in evaluation mode.

    Example:
        >>> Frozen(build_encoder("small-conv", channels=1)).train().encoder.training
        False
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.features = encoder.features

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z: Tensor = self.encoder(x)
        return z


def resnet18(*, channels: int = 3, stem: str = "standard") -> Encoder:
    """ResNet-18 with random weights and pooled 512-d features (He et al., 2016).

    `stem="3x3"`: one 3x3 stride-2 convolution for the first convolution and pooling; twice the resolution, 4x the work.
    """
    import torchvision  # not at import: it imports torch's compiler, in seconds

    net = torchvision.models.resnet18(weights=None)
    net.fc = nn.Identity()
    if stem == "3x3":
        net.maxpool = nn.Identity()
    if stem == "3x3" or channels != 3:
        size = 3 if stem == "3x3" else 7
        net.conv1 = nn.Conv2d(channels, 64, size, stride=2, padding=size // 2, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return Encoder(net, 512)


def small_conv(*, channels: int = 3, width: int = 32) -> Encoder:
    """Three 3x3 convolutions with BatchNorm and ReLU, then global average pooling: `4 * width` features."""
    layers: list[nn.Module] = []
    sizes = (channels, width, 2 * width, 4 * width)
    for position, (before, after) in enumerate(pairwise(sizes)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        if position < 2:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return Encoder(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), sizes[-1])


def _check_pixels(name: str, image_size: int) -> None:
    if image_size < 16:
        raise InputError(f"{name} needs images of 16 pixels or more, got {image_size}; give a larger image size")


def conv4(*, channels: int = 1, image_size: int = 28, width: int = 64) -> Encoder:
    """Four blocks of 3x3 convolution, BatchNorm, ReLU and 2x2 max-pooling, flattened (Vinyals et al., 2016)."""
    _check_pixels("conv4", image_size)
    layers: list[nn.Module] = []
    for before in (channels, width, width, width):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return Encoder(nn.Sequential(*layers, nn.Flatten()), width * (image_size // 16) ** 2)


def conv4_strided(*, channels: int = 1, width: int = 64) -> Encoder:
    """Four blocks of stride-2 3x3 convolution, BatchNorm and ReLU, then the mean (Finn et al., 2017, appendix A.1)."""
    layers: list[nn.Module] = []
    for before in (channels, width, width, width):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return Encoder(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), width)


class DropBlock(nn.Module):
    """Sets squares of `size` pixels of maps (B, C, H, W) to zero in training mode (Ghiasi et al., 2018).

    About `rate` of the maps after `ramp` batches, a growing share before; the rest is scaled up to keep the sum.
    """

    seen: Tensor

    def __init__(self, rate: float, size: int, ramp: int = 40_000) -> None:
        super().__init__()
        self.rate, self.size = number("rate", rate, least=0, below=1), whole("size", size, 1)
        self.ramp = whole("ramp", ramp, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.seen += 1
        height, width = x.shape[2:]
        size = min(self.size, height, width)
        places = (height - size + 1, width - size + 1)  # of a square's corner
        rate = self.rate * (self.seen / self.ramp).clamp(max=1)
        chance = rate * (height * width) / (size**2 * places[0] * places[1])
        corners = (torch.rand(*x.shape[:2], *places, device=x.device) < chance).to(x.dtype)
        kept = 1 - F.max_pool2d(F.pad(corners, (size - 1,) * 4), size, stride=1)
        return x * kept * (kept.numel() / kept.sum(dtype=torch.float32).clamp(min=1)).to(x.dtype)


class ResidualBlock(nn.Module):
    """Three 3x3 convolutions beside a 1x1 convolution, each with BatchNorm, then pooling by 2, of ResNet-12."""

    def __init__(self, before: int, after: int, drop: nn.Module) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for given in (before, after, after):
            layers += [nn.Conv2d(given, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.1)]
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after))
        self.last = nn.Sequential(nn.LeakyReLU(0.1), nn.MaxPool2d(2), drop)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(self.layers(x) + self.shortcut(x))
        return z


def resnet12(*, channels: int, image_size: int, pooled: bool = True, drop: float = 0.0, ramp: int = 40_000) -> Encoder:
    """ResNet-12 of 64-160-320-640 filters as MetaOptNet has it (Lee et al., 2019, section 4.1 and code).

    `pooled`: the mean over positions, 640 features; else all (2,560 of 32 pixels). `drop`: what dropout, in the first
    two blocks, and :class:`DropBlock` drop, by squares of 2 pixels for images below 64 pixels, else 5.
    """
    _check_pixels("resnet12", image_size)
    widths, size = (channels, 64, 160, 320, 640), 2 if image_size < 64 else 5
    drops = [nn.Dropout(drop) if place < 2 else DropBlock(drop, size, ramp) for place in range(4)]
    pairs = zip(pairwise(widths), drops, strict=True)
    blocks = [ResidualBlock(*pair, one if drop else nn.Identity()) for pair, one in pairs]
    net = nn.Sequential(*blocks, *[nn.AdaptiveAvgPool2d(1)] * pooled, nn.Flatten())
    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="leaky_relu")
    return Encoder(net, 640 if pooled else 640 * (image_size // 16) ** 2)


def mlp(*, channels: int, image_size: int, hidden: int = 512) -> Encoder:
    """Two fully connected ReLU layers over the pixels: the poster's MLP baseline (its widths are not given)."""
    first, second = nn.Linear(channels * image_size**2, hidden), nn.Linear(hidden, hidden)
    return Encoder(nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU()), hidden)


def build_encoder(
    name: str, *, channels: int = 3, image_size: int = 96, stem: str = "standard", drop: float = 0.0, ramp: int = 40_000
) -> Encoder:
    """Build an encoder by name, one of :data:`ENCODERS`; `stem` is of `resnet18`, `drop` and `ramp` of `resnet12`.

    Raises InputError: unknown name or stem, an `image_size` (pixels) that is not positive, `drop` of another encoder.

    Example:
        >>> build_encoder("resnet18", stem="3x3").features
        512
    """
    whole("channels", channels, 1)
    whole("image_size", image_size, 1)
    one_of("stem", stem, STEMS)
    if drop and not name.startswith("resnet12"):
        raise InputError(f"{name} drops no units: give drop=0, or take resnet12")
    more: dict[str, Any] = {"stem": stem} if name == "resnet18" else {}
    more |= {"drop": drop, "ramp": ramp} if name.startswith("resnet12") else {}
    return ENCODERS[one_of("encoder", name, ENCODERS)](channels=channels, image_size=image_size, **more)


ENCODERS: dict[str, Callable[..., Encoder]] = {  # of channels and image_size; add your own under a new name
    "conv4": conv4,
    "conv4-strided": lambda channels, image_size: conv4_strided(channels=channels),
    "mlp": mlp,
    "resnet12": resnet12,
    "resnet12-flat": partial(resnet12, pooled=False),
    "resnet18": lambda channels, image_size, stem: resnet18(channels=channels, stem=stem),
    "small-conv": lambda channels, image_size: small_conv(channels=channels),
}
LEARN2LEARN = {"l2l-cnn4": "CNN4", "l2l-omniglot-cnn": "OmniglotCNN"}


class Backbone(nn.Module):
    """An encoder of uint8 images (N, C, H, W), normalised here: logits (N, W), or features (N, D) without a head."""

    scale: Tensor
    offset: Tensor

    def __init__(self, encoder: nn.Module, head: nn.Module | None, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        for name, value in zip(("scale", "offset"), normalisation(mean, std), strict=True):
            self.register_buffer(name, value, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        z: Tensor = self.encoder(torch.addcmul(self.offset, images.float(), self.scale))
        return z if self.head is None else self.head(z)


def build_backbone(
    name: str,
    *,
    ways: int | None,
    channels: int,
    image_size: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    drop: float = 0.0,
    ramp: int = 40_000,
) -> Backbone:
    """Build a backbone by name: an encoder of :func:`build_encoder`, or learn2learn's CNN4 or OmniglotCNN.

    `ways`: outputs of the head, None for embeddings; `mean`, `std`: of each channel in 0..1 units, None for 0 and 1;
    `drop`, `ramp`: as for :func:`build_encoder`.
    Raises InputError: unknown name, learn2learn is not installed, or images that the network is not made for.
    """
    mean, std = mean or (0.0,) * channels, std or (1.0,) * channels
    one_of("backbone", name, (*ENCODERS, *LEARN2LEARN))
    if name not in LEARN2LEARN:
        encoder = build_encoder(name, channels=channels, image_size=image_size, drop=drop, ramp=ramp)
        return Backbone(encoder, None if ways is None else nn.Linear(encoder.features, ways), mean, std)
    if name == "l2l-omniglot-cnn" and (channels, image_size) != (1, 28):
        raise InputError(f"{name} takes grey images of 28 pixels, not {channels} channels of {image_size} pixels")
    models = require("learn2learn.vision.models", f"backbone {name}", "; or take conv4")
    sizes = {"hidden_size": 64, "channels": channels, "embedding_size": 64 * (image_size // 16) ** 2}
    net: Any = models.OmniglotCNN(ways or 1) if name == "l2l-omniglot-cnn" else models.CNN4(ways or 1, **sizes)
    return Backbone(net.features, None if ways is None else net.classifier, mean, std)
