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
    mean = luminance(x.mean((2, 3), keepdim=True))
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
        torch.where(high == green, (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)),
    )
    # A grey pixel has chroma 0 and numerator 0: any positive divisor gives hue 0, and c * w is 0 whatever
    # the hue.
    turned = torch.addcdiv(per_image(6 * shift), sextant, chroma.clamp_min(1e-6))
    own = torch.arange(0, 6, 2, device=x.device).view(1, 3, 1, 1)
    distance = (turned - own).remainder_(6).sub_(3).abs_()
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


def box_mask(start: Tensor, extent: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a bool mask (B, 1, H, W), True inside each image's box as far as the image reaches.

    Start and extent (B, 2) are (row, column) and (height, width) in pixels: the row with index i is inside
    when start <= i < start + extent, and so is a column.
    """
    index = torch.arange(max(shape), device=start.device)
    start, end = start.unsqueeze(2), (start + extent).unsqueeze(2)
    inside = (index >= start) & (index < end)
    rows, columns = inside[:, 0, : shape[0]], inside[:, 1, : shape[1]]
    return (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)


def crop_resize(x: Tensor, start: Tensor, extent: Tensor, flip: Tensor, size: int) -> Tensor:
    """Cut a box out of each image, mirror it where `flip` (B,) is True, resize it to (size, size): one
    sampling.

    Start and extent (B, 2) are (row, column) and (height, width) as shares 0..1 of the image's height and
    width; a box lies inside the image, is at least a pixel wide, and need not end between pixels. Bilinear
    without antialiasing, borders of the box replicated: torchvision's ``resized_crop(..., antialias=False)``.
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
    """Return the centres of `size` pixels as shares of their row."""
    return torch.linspace(0.5 / size, 1 - 0.5 / size, size, device=x.device, dtype=x.dtype)
