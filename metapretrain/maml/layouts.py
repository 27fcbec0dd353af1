"""Large images of a task's query part, laid out channels last on a CPU.

There pooling is many times faster so, and convolutions somewhat. Sums over images and pixels are slower, of which the
second derivative of batch normalisation has many: the inner loop keeps its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metapretrain.maml.inner import Named
from metapretrain.maml.nests import Nest, map_tensors, tensors

SMALL = 32 * 32  # pixels: images of 28 x 28 lose by it, of 84 x 84 they gain (docs/maml.md)


class ReshapingViews(TorchFunctionMode):
    """Within it `view` copies where the layout needs it, as `reshape` does, instead of an error.

    Example:
        >>> x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
        >>> with ReshapingViews():
        ...     x.view(2, -1).shape
        torch.Size([2, 48])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `view` to a shape; everything else runs as it is."""
        if func is Tensor.view and not kwargs and not isinstance(args[1], torch.dtype):
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))


def channels_last(params: Named, data: Nest) -> tuple[Named, Nest, AbstractContextManager[object]]:
    """Filters and images channels last, and the context to use them in; all as it is where it would not help."""
    images = [x for x in tensors(data) if _is_image(x) and x.shape[2] * x.shape[3] > SMALL]
    if not images or not any(map(_is_image, params.values())):
        return params, data, nullcontext()
    return {name: _laid_out(p) for name, p in params.items()}, map_tensors(_laid_out, data), ReshapingViews()


def _is_image(x: Tensor) -> bool:
    return x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu"  # others have no such kernels


def _laid_out(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if _is_image(x) else x
