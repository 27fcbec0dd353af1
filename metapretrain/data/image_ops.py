"""Image operations with one parameter an image, on a whole batch at once.

Every function takes float32 images (B, C, H, W) in 0..255 and parameters (B,) on the same device, and does in
one batched computation what torchvision's function of the same meaning does to each image with its own
parameter. None synchronises with the device, and all shapes are static, so they can be captured in a CUDA
graph or compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
    mean = luminance(x).mean((1, 2, 3), keepdim=True)
    return torch.lerp(mean, x, per_image(factor)).clamp_(0, MAX_VALUE)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its grey version: factor * x + (1 - factor) * grey, clamped."""
    return torch.lerp(luminance(x), x, per_image(factor)).clamp_(0, MAX_VALUE)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of each RGB image by shift (B,) full turns, -0.5..0.5, exactly as in HSV.

    Value and saturation stay, so the channel minimum m and the chroma c = max - m stay, and each channel
    becomes m + c * w, where w is a trapezoid of the new hue: 1 within 60 degrees of the channel's own hue
    (red 0, green 120, blue 240), 0 beyond 120.
    """
    red, green, blue = x.chunk(3, dim=1)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    chroma = high - low
    sextant = torch.where(
        high == red,
        green - blue,
        torch.where(high == green, blue - red + 2 * chroma, red - green + 4 * chroma),
    )
    # A grey pixel has chroma 0 and numerator 0: any positive divisor gives hue 0, and c * w is 0 whatever the
    # hue.
    turned = sextant / chroma.clamp_min(1e-6) + per_image(6 * shift)
    distance = torch.cat([turned, turned - 2, turned - 4], dim=1).remainder_(6).sub_(3).abs_()
    return torch.addcmul(low - chroma, distance.clamp_(1, 2), chroma)


def grayscale(x: Tensor, chosen: Tensor) -> Tensor:
    """Replace the images chosen by a bool (B,) by their luminance, in all channels."""
    return torch.where(per_image(chosen), luminance(x), x)


def gaussian_blur(x: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Blur each image with a Gaussian of its own sigma (B,) in pixels, > 0, cut at an odd `kernel_size`.

    The borders are reflected. Separable: a depthwise convolution along each axis. A sigma far below 1 (0.05,
    say) leaves the image as it is.
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


def box_mask(top: Tensor, left: Tensor, height: Tensor, width: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a bool mask (B, 1, H, W), True inside each image's box as far as the image reaches.

    A pixel is inside when its index i has top <= i < top + height, and so for the columns.
    """
    rows = torch.arange(shape[0], device=top.device)
    columns = torch.arange(shape[1], device=top.device)
    top, left, height, width = (value.view(-1, 1) for value in (top, left, height, width))
    inside_rows = (rows >= top) & (rows < top + height)
    inside_columns = (columns >= left) & (columns < left + width)
    return (inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1)).unsqueeze(1)


def crop_resize(
    x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor, size: int
) -> Tensor:
    """Cut a box out of each image, mirror it where `flip` (bool), resize it to (size, size): one sampling.

    Boxes are in pixels (B,), need not be whole, and lie inside the image. Bilinear without antialiasing,
    borders of the box replicated: torchvision's ``resized_crop(..., antialias=False)``.
    """
    steps = (torch.arange(size, device=x.device, dtype=x.dtype) + 0.5) / size
    across = torch.where(flip.view(-1, 1), 1 - steps, steps)
    columns = _positions(across, left.view(-1, 1), width.view(-1, 1), x.shape[3])
    rows = _positions(steps, top.view(-1, 1), height.view(-1, 1), x.shape[2])
    shape = (x.shape[0], size, size)
    grid = torch.stack([columns.unsqueeze(1).expand(shape), rows.unsqueeze(2).expand(shape)], dim=3)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def crop_rotate(
    x: Tensor,
    top: Tensor,
    left: Tensor,
    height: Tensor,
    width: Tensor,
    flip: Tensor,
    angle: Tensor,
    size: int,
) -> Tensor:
    """As :func:`crop_resize`, with the box turned by angle (B,) in radians, counter-clockwise as it is seen.

    The box may reach out of the image, which is then continued by reflection.
    """
    steps = (torch.arange(size, device=x.device, dtype=x.dtype) + 0.5) / size - 0.5
    across = torch.where(flip.view(-1, 1), -steps, steps) * width.view(-1, 1)
    down = steps * height.view(-1, 1)
    across, down = across.unsqueeze(1), down.unsqueeze(2)
    cosine, sine = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    columns = (left + width / 2).view(-1, 1, 1) + cosine * across - sine * down
    rows = (top + height / 2).view(-1, 1, 1) + sine * across + cosine * down
    grid = torch.stack([columns * (2 / x.shape[3]) - 1, rows * (2 / x.shape[2]) - 1], dim=3)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _positions(steps: Tensor, start: Tensor, extent: Tensor, length: int) -> Tensor:
    """Map 0..1 along a box to grid_sample's -1..1, kept half a pixel inside: only the box is read."""
    position = start + steps * extent
    inside = torch.maximum(torch.minimum(position, start + extent - 0.5), start + 0.5)
    return inside * (2 / length) - 1
