"""Attention masks that are made from the tokens' mask without looking at its values on the host."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_WINDOWS = ("attention_window", "local_attention", "sliding_window")  # attributes of models whose layers mask more


def expand_mask(mask: Tensor, form: int, dtype: torch.dtype) -> Tensor:
    """Give a mask of tokens the form that a model takes as ready made.

    Transformers asks a mask (B, L) whether anything is padding, which makes the host wait for the device and cannot
    be recorded as a CUDA graph. A mask with more dimensions is taken as it is.

    Args:
        mask: (B, L), 1 for tokens and 0 for padding.
        form: 4: what is added to the scores of attention, (B, 1, L, L), 0 or the lowest number of `dtype`;
            3: (B, L, L) of 1 and 0; 2: `mask` itself.
        dtype: of the attention's arithmetic.

    Example:
        >>> expand_mask(torch.tensor([[1, 1, 0]]), 4, torch.float16)[0, 0, 0].tolist()
        [0.0, 0.0, -65504.0]
    """
    if form == 2:
        return mask
    size = mask.shape[-1]
    if form == 3:
        return mask[:, None, :].expand(-1, size, -1)
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    added = added.masked_fill(mask == 0, torch.finfo(dtype).min)
    return added[:, None, None, :].expand(-1, 1, size, -1)


@torch.no_grad()
def mask_form(model: Any) -> int:
    """Find the form of mask (see :func:`expand_mask`) that makes `model` ignore padding: 4, 3 or 2 dimensions.

    Versions and kinds of models differ in what they take, so this tries two rows of four tokens: what is padding
    must not change any bit of the other tokens' states, and these must be those of the model's own mask. 2 is right
    for every model, but cannot be recorded as a CUDA graph; models with attention windows get it. A model that mixes
    padding into its states whatever the mask (one with convolutions) is named in a warning.
    """
    windows = any(getattr(model.config, name, None) for name in _WINDOWS)
    training = model.training
    model.eval()
    ids = torch.tensor([[4, 5, 6, 7], [7, 6, 5, 4]], device=model.device) % model.config.vocab_size
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=model.device)
    others = torch.where(mask == 1, ids, (ids + 1) % model.config.vocab_size)
    try:
        own = _states(model, ids, mask, 2)
        for form in () if windows else (4, 3):
            try:
                found = [_states(model, given, mask, form) for given in (ids, others)]
            except (ValueError, RuntimeError, TypeError, IndexError) as error:
                logger.debug("%s takes no mask of %d dimensions: %s", type(model).__name__, form, error)
                continue
            if torch.equal(found[0], found[1]) and torch.allclose(found[0], own, rtol=1e-3, atol=1e-3):
                return form
        leaks = not torch.equal(own, _states(model, others, mask, 2))
    finally:
        model.train(training)
    if leaks:
        logger.warning("padding changes the states of %s: its embeddings depend on the batch", type(model).__name__)
    logger.info("%s makes its attention masks itself: its updates cannot be recorded", type(model).__name__)
    return 2


def _states(model: Any, ids: Tensor, mask: Tensor, form: int) -> Tensor:
    states: Tensor = model(input_ids=ids, attention_mask=expand_mask(mask, form, model.dtype))[0]
    return states[mask == 1]
