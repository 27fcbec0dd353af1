"""Image encoders: normalised images in, pooled features out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError, one_of

ENCODERS = ("conv4", "conv4-strided", "mlp", "resnet18", "small-conv")
STEMS = ("standard", "3x3")


class Encoder(nn.Module):
    """A backbone and the size of the feature vector that it returns.

    Args:
        backbone: maps images `(B, C, H, W)` to features `(B, D)`.
        features: D.

    Example:
        >>> encoder = build_encoder("small-conv", channels=1, image_size=8)
        >>> encoder(torch.zeros(2, 1, 8, 8)).shape == (2, encoder.features)
        True
    """

    compilable = True  # the training loop compiles such modules when asked to

    def __init__(self, backbone: nn.Module, features: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Encode images `(B, C, H, W)` into features `(B, D)`."""
        z: Tensor = self.backbone(x)
        return z


class Frozen(nn.Module):
    """An encoder that takes no gradient and whose BatchNorm stays in evaluation mode.

    Example:
        >>> frozen = Frozen(build_encoder("small-conv", channels=1, image_size=8)).train()
        >>> frozen.encoder.training, frozen(torch.zeros(2, 1, 8, 8)).requires_grad
        (False, False)
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.features = encoder.features

    def train(self, mode: bool = True) -> Frozen:
        """Set the mode of this wrapper; the encoder inside stays in evaluation mode."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Encode images `(B, C, H, W)` into features `(B, D)` without a graph."""
        with torch.no_grad():
            z: Tensor = self.encoder(x)
        return z


def resnet18(*, channels: int = 3, stem: str = "standard") -> Encoder:
    """ResNet-18 with random weights and pooled 512-d features (He et al., 2016).

    `stem="3x3"` replaces the 7x7 stride-2 convolution and the pooling by one 3x3 stride-2 convolution, which keeps
    twice the resolution in every stage: better for images of 96 pixels, and four times the arithmetic.
    """
    import torchvision  # not at import: it imports torch's compiler, in seconds

    net = torchvision.models.resnet18(weights=None)
    net.fc = nn.Identity()
    if stem == "3x3":
        net.conv1 = nn.Conv2d(channels, 64, 3, stride=2, padding=1, bias=False)
        net.maxpool = nn.Identity()
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    elif channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
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


def conv4(*, channels: int = 1, image_size: int = 28, width: int = 64) -> Encoder:
    """Four blocks of 3x3 convolution, BatchNorm, ReLU and 2x2 max-pooling: the network of few-shot papers.

    Features are the flattened last map: `width` for images of 28 pixels, `25 * width` for 84 (Vinyals et al., 2016).

    Raises:
        InputError: images of less than 16 pixels, of which four poolings leave nothing.
    """
    if image_size < 16:
        raise InputError(f"conv4 needs images of 16 pixels or more, got {image_size}; give a larger image size")
    layers: list[nn.Module] = []
    for before in (channels, width, width, width):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return Encoder(nn.Sequential(*layers, nn.Flatten()), width * (image_size // 16) ** 2)


def conv4_strided(*, channels: int = 1, width: int = 64) -> Encoder:
    """Four blocks of 3x3 convolution of stride 2, BatchNorm and ReLU, then the mean over the map: `width` features.

    The network of the MAML paper for Omniglot (Finn et al., 2017, appendix A.1), with a quarter of conv4's arithmetic.
    """
    layers: list[nn.Module] = []
    for before in (channels, width, width, width):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return Encoder(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), width)


def mlp(*, channels: int, image_size: int, hidden: int = 512) -> Encoder:
    """Two fully connected ReLU layers over the pixels: the poster's MLP baseline (its widths are not given)."""
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * image_size**2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
    )
    return Encoder(net, hidden)


def build_encoder(name: str, *, channels: int = 3, image_size: int = 96, stem: str = "standard") -> Encoder:
    """Build an encoder by name: one of :data:`ENCODERS`.

    Args:
        channels: colour planes of the images.
        image_size: height and width in pixels.
        stem: `standard` or `3x3`; only `resnet18` has stems.

    Raises:
        InputError: unknown name or stem, or a size that is not positive.

    Example:
        >>> build_encoder("resnet18", stem="3x3").features
        512
    """
    if channels < 1 or image_size < 1:
        raise InputError(f"channels and image_size must be at least 1, got {channels} and {image_size}")
    one_of("stem", stem, STEMS)
    builders: dict[str, Callable[[], Encoder]] = {
        "conv4": lambda: conv4(channels=channels, image_size=image_size),
        "conv4-strided": lambda: conv4_strided(channels=channels),
        "resnet18": lambda: resnet18(channels=channels, stem=stem),
        "small-conv": lambda: small_conv(channels=channels),
        "mlp": lambda: mlp(channels=channels, image_size=image_size),
    }
    return builders[one_of("encoder", name, ENCODERS)]()
