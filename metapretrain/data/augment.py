"""Random augmentation of a whole batch on its device, with parameters of each image's own.

Every function takes float32 images (B, C, H, W) in 0..255 and parameters (B,) on the same device, and does to each
image what torchvision's function does, without waiting for the device and in fixed shapes, as CUDA graphs need it.

Order: crop, mirror, rotate and shift in one bilinear sampling; then brightness, contrast, saturation, hue; grey; blur;
normalisation; cutout. Differences to torchvision: this order is fixed; crop boxes are not rounded to pixels, and one
that would not fit is narrowed, not drawn again; resizing does not antialias (read images at twice the size at most).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from metapretrain.checks import number, whole
from metapretrain.data.images import normalisation
from metapretrain.errors import InputError, one_of

MAX_VALUE = 255.0


def per_image(parameter: Tensor) -> Tensor:
    """Return a parameter (B,) as (B, 1, 1, 1), to be broadcast over each image."""
    return parameter.view(-1, 1, 1, 1)


def luminance(x: Tensor) -> Tensor:
    """Return the grey image (B, 1, H, W) with the weights of ITU-R 601 as torchvision rounds them."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.chunk(3, dim=1)
    grey: Tensor = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return grey


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply each image by its factor (B,) and clamp."""
    return (x * per_image(factor)).clamp_(0, MAX_VALUE)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its own mean luminance: factor * x + (1 - factor) * mean, clamped."""
    mean = luminance(x.mean((2, 3), keepdim=True))
    return torch.lerp(mean, x, per_image(factor)).clamp_(0, MAX_VALUE)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its grey version: factor * x + (1 - factor) * grey, clamped."""
    return torch.lerp(luminance(x), x, per_image(factor)).clamp_(0, MAX_VALUE)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of each RGB image by shift (B,) full turns, -0.5..0.5, exactly as in HSV.

    The channel minimum m and the chroma c = max - m stay, and each channel becomes m + c * w, where w is a trapezoid of
    the new hue: 1 within 60 degrees of the channel's own hue (red 0, green 120, blue 240), 0 beyond 120.
    """
    red, green, blue = x.chunk(3, dim=1)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    chroma = high - low
    sextant = torch.where(
        high == red,
        green - blue,
        torch.where(high == green, (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)),
    )
    # A grey pixel has chroma 0 and numerator 0: any positive divisor will do, c * w is 0 whatever the hue.
    turned = torch.addcdiv(per_image(6 * shift), sextant, chroma.clamp_min(1e-6))
    own = torch.arange(0, 6, 2, device=x.device).view(1, 3, 1, 1)
    distance = (turned - own).remainder_(6).sub_(3).abs_()
    return torch.addcmul(low - chroma, distance.clamp_(1, 2), chroma)


def grayscale(x: Tensor, chosen: Tensor) -> Tensor:
    """Replace the images chosen by a bool (B,) by their luminance, in all channels."""
    return torch.where(per_image(chosen), luminance(x), x)


def gaussian_blur(x: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Blur each image with a Gaussian of its own sigma (B,) in pixels, > 0, cut at an odd `kernel_size`.

    The borders are reflected. A sigma far below 1 (0.05, say) leaves the image as it is.
    """
    batch, channels, height, width = x.shape
    reach = kernel_size // 2
    offsets = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    kernel = torch.softmax(-0.5 * (offsets / sigma.view(-1, 1)).square(), dim=1)
    weight = kernel.repeat_interleave(channels, dim=0, output_size=batch * channels)
    padded = functional.pad(x, (reach, reach, reach, reach), mode="reflect")
    planes = padded.reshape(1, batch * channels, height + 2 * reach, width + 2 * reach)
    planes = functional.conv2d(planes, weight.view(-1, 1, kernel_size, 1), groups=batch * channels)
    planes = functional.conv2d(planes, weight.view(-1, 1, 1, kernel_size), groups=batch * channels)
    return planes.view(batch, channels, height, width)


def box_mask(start: Tensor, extent: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a bool mask (B, 1, H, W), True where start <= row and column < start + extent, both (B, 2) in pixels."""
    index = torch.arange(max(shape), device=start.device)
    start, end = start.unsqueeze(2), (start + extent).unsqueeze(2)
    inside = (index >= start) & (index < end)
    rows, columns = inside[:, 0, : shape[0]], inside[:, 1, : shape[1]]
    return (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)


def crop_resize(x: Tensor, start: Tensor, extent: Tensor, flip: Tensor, size: int) -> Tensor:
    """Cut a box out of each image, mirror it where `flip` (B,) is True, resize it to (size, size), in one sampling.

    Start and extent (B, 2) are (row, column) and (height, width) as shares 0..1 of the image's; a box lies inside the
    image and is at least a pixel wide. As torchvision's ``resized_crop(..., antialias=False)``.
    """
    # Half a pixel of each axis, made on the device: copying two numbers to it would synchronise.
    inset = torch.linspace(0.5 / x.shape[2], 0.5 / x.shape[3], 2, device=x.device).view(2, 1)
    start, extent = start.unsqueeze(2), extent.unsqueeze(2)
    along = torch.minimum(torch.maximum(_steps(size, x) * extent, inset), extent - inset)
    rows, columns = (along + start).mul_(2).sub_(1).unbind(1)
    shape = (x.shape[0], size, size)
    columns = torch.where(flip.view(-1, 1), columns.flip(1), columns)
    grid = torch.stack([columns.unsqueeze(1).expand(shape), rows.unsqueeze(2).expand(shape)], dim=3)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def shifted(x: Tensor, corner: Tensor, flip: Tensor, pad: int) -> Tensor:
    """Cut each image (B, C, H, W) at its corner (B, 2) out of itself with `pad` zeros around, and mirror it by `flip`.

    Corners are whole numbers from 0 to 2 `pad`, (row, column); the result lies channels last.
    """
    height, width = x.shape[2:]
    padded = functional.pad(x, (pad,) * 4).permute(0, 2, 3, 1)
    rows = corner[:, :1] + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device)
    columns = corner[:, 1:] + torch.where(flip.view(-1, 1), across.flip(0), across)
    image = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    return padded[image, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def crop_rotate(x: Tensor, start: Tensor, extent: Tensor, flip: Tensor, angle: Tensor, size: int) -> Tensor:
    """As :func:`crop_resize`, with the box turned by angle (B,) in radians, counter-clockwise as it is seen.

    The box may reach out of the image, which is then continued by reflection.
    """
    height, width = x.shape[2:]
    steps = _steps(size, x) - 0.5
    across = torch.where(flip.view(-1, 1), -steps, steps) * extent[:, 1:]
    down = steps * extent[:, :1]
    across, down = across.unsqueeze(1), down.unsqueeze(2)
    cosine, sine = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    centre = (start + extent / 2).unsqueeze(2).unsqueeze(3)
    columns = centre[:, 1] + cosine * across - sine * (height / width) * down
    rows = centre[:, 0] + sine * (width / height) * across + cosine * down
    grid = torch.stack([columns, rows], dim=3).mul_(2).sub_(1)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _steps(size: int, x: Tensor) -> Tensor:
    """The centres of `size` pixels as shares of their row."""
    return torch.linspace(0.5 / size, 1 - 0.5 / size, size, device=x.device, dtype=x.dtype)


Range = tuple[float, float]
UNIT = (0.0, 1.0)
JITTER_STEPS = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
JITTER = tuple(JITTER_STEPS)
NO_BLUR = 0.02
"""A sigma whose kernel is exactly one pixel in float32."""


class BatchAugment(nn.Module):
    """Augment and normalise a batch of uint8 images, each with random parameters of its own.

    All randomness is one ``torch.rand`` on the images' device from its default generator. With one channel, saturation,
    hue and grey are left out. Move the module to the images' device.

    Args:
        size: height and width of the result in pixels.
        crop_scale: range of the crop's share of the area, 0 < low <= high <= 1; None: no random crop.
        crop_ratio: range of the crop's width / height, drawn log-uniformly.
        flip: mirror left to right with probability 1/2.
        pad: crop at a random place of the image with so many zeros around it, at whole pixels.
        rotate, shift: largest angle in degrees, and shift in each direction as a share of the image's size, either way.
        color_jitter: strengths (brightness, contrast, saturation, hue): factors 1 - s..1 + s, hue -s..s turns.
        jitter_prob, grayscale_prob, blur_prob: probability that an image is jittered, made grey, blurred.
        blur_sigma: range of the blur's sigma in pixels; the kernel is a tenth of the image, odd, at least 3.
        cutout: side in pixels of the square that is set to the mean, centred anywhere; 0: none.
        mean, std: of each channel, 0..1 units.

    Raises InputError: a setting is out of its range, or (when called) the batch does not fit the module.

    Example:
        >>> augment = BatchAugment(8, crop_scale=(0.4, 1.0), flip=True, mean=(0.5,) * 3, std=(0.25,) * 3)
        >>> x = augment(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
        >>> x.shape, x.dtype, x.unique().tolist()
        (torch.Size([2, 3, 8, 8]), torch.float32, [-2.0])
    """

    compilable = True  # the training loop compiles such modules when asked to

    low: Tensor
    span: Tensor
    identity: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(
        self,
        size: int,
        *,
        crop_scale: Range | None = None,
        crop_ratio: Range = (3 / 4, 4 / 3),
        flip: bool = False,
        pad: int = 0,
        rotate: float = 0.0,
        shift: float = 0.0,
        color_jitter: tuple[float, float, float, float] | None = None,
        jitter_prob: float = 1.0,
        grayscale_prob: float = 0.0,
        blur_prob: float = 0.0,
        blur_sigma: Range = (0.1, 2.0),
        cutout: int = 0,
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        whole("size", size, 1)
        whole("cutout", cutout)
        self.pad = whole("pad", pad)
        number("rotate", rotate, least=0, most=180)
        shares = {"shift": shift, "jitter_prob": jitter_prob, "grayscale_prob": grayscale_prob, "blur_prob": blur_prob}
        ranges = {"crop_scale": crop_scale or (1.0, 1.0), "crop_ratio": crop_ratio, "blur_sigma": blur_sigma}
        _check(shares, ranges, color_jitter)
        scale, offset = normalisation(mean, std)
        self.size, self.channels, self.cutout = size, len(mean), cutout
        self.crops, self.flips, self.turns = crop_scale is not None, flip, bool(rotate or shift)
        color = self.channels == 3
        jitter = color_jitter or (0.0, 0.0, 0.0, 0.0)
        strengths = zip(JITTER, jitter, strict=True)
        jitters = {name: s for name, s in strengths if s and (color or name in JITTER[:2])}
        self.jitters = tuple(jitters)
        self.jitter_prob = jitter_prob if self.jitters else 0.0
        self.grayscale_prob = grayscale_prob if color else 0.0
        self.blur_prob = blur_prob
        self.kernel_size = max(3, size // 10 // 2 * 2 + 1)
        self.channels_last = channels_last
        drawn = {
            "area": [crop_scale or (1.0, 1.0)] * self.crops,
            "half_log_ratio": [(math.log(crop_ratio[0]) / 2, math.log(crop_ratio[1]) / 2)] * self.crops,
            "corner": [UNIT, UNIT] * self.crops,
            "pad": [UNIT, UNIT] * bool(pad),
            "flip": [UNIT] * self.flips,
            "angle": [(-math.radians(rotate), math.radians(rotate))] * self.turns,
            "shift": [(-shift, shift)] * 2 * self.turns,
            "jitter": [(-s, s) if name == "hue" else (max(0.0, 1 - s), 1 + s) for name, s in jitters.items()],
            "jittered": [UNIT] * bool(self.jitters),
            "grey": [UNIT] * bool(self.grayscale_prob),
            "blurred": [UNIT] * bool(self.blur_prob),
            "sigma": [blur_sigma] * bool(self.blur_prob),
            "cut": [UNIT, UNIT] * bool(self.cutout),
        }
        self.counts = {name: len(intervals) for name, intervals in drawn.items()}
        bounds = torch.tensor([pair for pairs in drawn.values() for pair in pairs]).view(-1, 2)
        self.register_buffer("low", bounds[:, 0].clone(), persistent=False)
        self.register_buffer("span", bounds[:, 1] - bounds[:, 0], persistent=False)
        still = torch.tensor([0.0 if name == "hue" else 1.0 for name in self.jitters])
        self.register_buffer("identity", still, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return normalised float32 (B, channels, size, size) from uint8 images (B, channels, H, W)."""
        self._check_batch(images)
        # Under autocast the blur's convolution would run in half precision.
        with torch.autocast(device_type=images.device.type, enabled=False):
            return self.apply_parameters(images, self.draw(images))

    def draw(self, images: Tensor) -> dict[str, Tensor]:
        """Draw each image's parameters, by name (B, numbers), from the default generator of the device."""
        uniform = torch.rand(len(images), len(self.low), device=images.device)
        values = torch.addcmul(self.low, uniform, self.span)
        drawn = dict(zip(self.counts, values.split(list(self.counts.values()), dim=1), strict=True))
        if self.jitters and self.jitter_prob < 1:
            drawn["jitter"] = torch.where(drawn["jittered"] < self.jitter_prob, drawn["jitter"], self.identity)
        return drawn

    def apply_parameters(self, images: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        """Return what :meth:`forward` returns, with parameters as :meth:`draw` gives them."""
        x = self._place(images.float(), drawn)
        for column, name in enumerate(self.jitters):
            x = JITTER_STEPS[name](x, drawn["jitter"][:, column])
        if self.grayscale_prob:
            x = grayscale(x, drawn["grey"] < self.grayscale_prob)
        if self.blur_prob:
            sigma = drawn["sigma"].masked_fill(drawn["blurred"] >= self.blur_prob, NO_BLUR)
            x = gaussian_blur(x, sigma, self.kernel_size)
        x = torch.addcmul(self.offset, x, self.scale)
        if self.cutout:
            start = (drawn["cut"] * self.size).floor_() - self.cutout // 2
            mask = box_mask(start, torch.full_like(start, self.cutout), (self.size, self.size))
            x = x.masked_fill(mask, 0.0)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def _place(self, x: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
        flip = drawn["flip"] < 0.5 if self.flips else torch.zeros(len(x), dtype=torch.bool, device=x.device)
        if self.pad:
            corner = (drawn["pad"] * (2 * self.pad + 1)).long()
            x, flip = shifted(x, corner, flip, self.pad), torch.zeros_like(flip)
        if not (self.crops or self.turns or (self.flips and not self.pad)):
            size = (self.size, self.size)
            same = x.shape[-2:] == size
            return x if same else functional.interpolate(x, size, mode="bilinear", align_corners=False)
        start = torch.zeros(len(x), 2, device=x.device)
        extent = torch.ones_like(start)
        if self.crops:
            height, width = x.shape[2:]
            # (height, width) as shares of the image, from the share of the area and log(width / height).
            squeeze = drawn["half_log_ratio"] - 0.5 * math.log(width / height)
            stretch = torch.cat([-squeeze, squeeze], dim=1).exp_()
            extent = (drawn["area"].sqrt() * stretch).clamp_(1 / min(height, width), 1)
            start = drawn["corner"] * (1 - extent)
        if not self.turns:
            return crop_resize(x, start, extent, flip, self.size)
        start = start - drawn["shift"]
        return crop_rotate(x, start, extent, flip, drawn["angle"], self.size)

    def _check_batch(self, images: Tensor) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != self.channels:
            raise InputError(
                f"augmentation takes uint8 images (B, {self.channels}, H, W), got {images.dtype} {tuple(images.shape)}"
            )
        if images.device != self.scale.device:
            told = f"images are on {images.device}, the augmentation on {self.scale.device}"
            raise InputError(f"{told}: move it with .to(device)")


_PLAIN: dict[str, Any] = {"crop_scale": (0.4, 1.0), "flip": True}
_STRONG = _PLAIN | {"color_jitter": (0.4, 0.4, 0.4, 0.1), "grayscale_prob": 0.1, "cutout": 1 / 3}
_HEAVY = _STRONG | {"crop_scale": (0.2, 1.0), "rotate": 15.0, "color_jitter": (0.6, 0.6, 0.6, 0.15)}
_HEAVY |= {"jitter_prob": 0.8, "blur_prob": 0.1}
_SIMCLR = _PLAIN | {"crop_scale": (0.08, 1.0), "color_jitter": (0.8, 0.8, 0.8, 0.2)}
_SIMCLR |= {"jitter_prob": 0.8, "grayscale_prob": 0.2, "blur_prob": 0.5}
AUGMENTATIONS = {"none": {}, "plain": _PLAIN, "strong": _STRONG, "heavy": _HEAVY, "simclr": _SIMCLR}
"""Settings of each preset; ``cutout`` as a share of the size. "simclr": Chen et al. (2020), appendix A."""


def make_augmentation(
    name: str, size: int, channels: int, mean: Sequence[float], std: Sequence[float], **changes: Any
) -> BatchAugment:
    """Return a preset of :data:`AUGMENTATIONS` with `changes` to its settings (``flip=False`` for digits)."""
    settings = dict(AUGMENTATIONS[one_of("augmentation", name, AUGMENTATIONS)])
    if "cutout" in settings:
        settings["cutout"] = int(size * settings["cutout"])
    if len(mean) != channels:
        raise InputError(f"mean must have {channels} values, one a channel, got {len(mean)}")
    allowed = list(BatchAugment.__init__.__kwdefaults__ or {})
    for key in changes:
        one_of("augmentation setting", key, allowed)
    return BatchAugment(size, mean=mean, std=std, **(settings | changes))


def _check(shares: Mapping[str, float], ranges: Mapping[str, Range], color_jitter: Sequence[float] | None) -> None:
    for name, share in shares.items():
        number(name, share, least=0, most=1)
    for name, (low, high) in ranges.items():
        number(f"{name}'s high", high, above=0, most=1 if name == "crop_scale" else math.inf)
        number(f"{name}'s low", low, above=0, most=high)
    if color_jitter is not None and not (len(color_jitter) == 4 and min(color_jitter) >= 0 and color_jitter[3] <= 0.5):
        raise InputError(f"color_jitter is {color_jitter!r}; give four strengths of at least 0, hue at most 0.5")
