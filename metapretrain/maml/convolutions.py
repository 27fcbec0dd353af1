"""Convolutions with weights of each task's own as batched matrix products.

Under vmap a convolution whose weights differ between tasks becomes a grouped one, for which cuDNN has slow kernels
only. Its patches laid side by side (im2col) and one batched matrix product do the same work with fast ones. Run as they
are, patches are cheapest as a strided view that is copied once; in a graph that will be compiled, as a slice for each
weight of the filter: the derivative of a view is scattered memory, that of slices is fused with what surrounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metapretrain.maml.steps import holding

_sliced: ContextVar[bool] = ContextVar("patches as slices", default=False)
LARGEST = 32 * 32  # pixels: above, writing the patches costs more than the grouped convolution (docs/maml.md)


class MatmulConvolutions(TorchFunctionMode):
    """Within it `conv2d` is a matrix product, where that is possible and fast.

    That is: one group, no dilation, padding in numbers, and images of at most `largest` pixels.

    Example:
        >>> x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
        >>> expected = F.conv2d(x, weight, stride=2, padding=1)
        >>> with MatmulConvolutions():
        ...     torch.allclose(F.conv2d(x, weight, stride=2, padding=1), expected, atol=1e-5)
        True
    """

    def __init__(self, largest: int = LARGEST) -> None:
        super().__init__()
        self.largest = largest

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `conv2d`; everything else runs as it is."""
        if func in (F.conv2d, torch.conv2d):
            replaced = _convolution(self.largest, *args, **(kwargs or {}))
            if replaced is not None:
                return replaced
        return func(*args, **(kwargs or {}))


def _convolution(
    largest: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    if groups != 1 or isinstance(padding, str) or _pair(dilation) != (1, 1) or input.ndim != 4:
        return None
    if input.shape[-1] * input.shape[-2] > largest:
        return None
    return matmul_conv2d(input, weight, bias, _pair(stride), _pair(padding))


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def matmul_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """`conv2d` of x (N, C, H, W) with weight (O, C, h, w): (N, O, H', W'), as a matrix product.

    The result's memory is laid out channels first, (O, N, H', W'), as the next product wants it.
    """
    out, _, height, width = weight.shape
    padded = F.pad(x.transpose(0, 1), (padding[1], padding[1], padding[0], padding[0]))
    patches = (_slices if _sliced.get() else _windows)(padded, height, width, stride)
    _, _, _, images, rows, columns = patches.shape
    result = weight.reshape(out, -1) @ patches.reshape(-1, images * rows * columns)
    if bias is not None:
        result = result + bias[:, None]
    return result.reshape(out, images, rows, columns).transpose(0, 1)


def _windows(x: Tensor, height: int, width: int, stride: tuple[int, int]) -> Tensor:
    """The patches of x (C, N, H, W): (C, h, w, N, H', W')."""
    return x.unfold(2, height, stride[0]).unfold(3, width, stride[1]).permute(0, 4, 5, 1, 2, 3)


def _slices(x: Tensor, height: int, width: int, stride: tuple[int, int]) -> Tensor:
    """The same as :func:`_windows`."""
    down, right = stride
    rows, columns = (x.shape[2] - height) // down * down + 1, (x.shape[3] - width) // right * right + 1
    found = [
        torch.stack([x[:, :, i : i + rows : down, j : j + columns : right] for j in range(width)], 1)
        for i in range(height)
    ]
    return torch.stack(found, 1)


def sliced_patches() -> AbstractContextManager[None]:
    """Take patches as slices inside the block, for a graph that will be compiled."""
    return holding(_sliced, True)
