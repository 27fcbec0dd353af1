"""MAML's kin, as learners over any module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from metapretrain.errors import InputError
from metapretrain.maml.clones import last_module
from metapretrain.maml.learner import MAML
from metapretrain.maml.rates import checked_rate


class FOMAML(MAML):
    """First-order MAML (Finn et al., 2017, section 5.2): inner gradients are taken as constants.

    Example:
        >>> FOMAML(nn.Linear(2, 2), lr=0.1).first_order
        True
    """

    def __init__(self, model: nn.Module, lr: Any, **options: Any) -> None:
        super().__init__(model, lr, **{**options, "first_order": True})


class ANIL(MAML):
    """Almost no inner loop (Raghu et al., 2020): only the head adapts, the body is meta-learned.

    Args:
        head: name of the head, or several; None: the module that holds the last parameter.

    Example:
        >>> ANIL(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), lr=0.1).only
        '2'
    """

    def __init__(self, model: nn.Module, lr: Any, *, head: Any = None, **options: Any) -> None:
        super().__init__(model, lr, **{"only": last_module(model) if head is None else head, **options})


class MetaSGD(MAML):
    """Meta-SGD (Li et al., 2017): every parameter has an inner rate of its own, which is learned.

    Args:
        lr: where all rates start, above 0.
        lrs: rates to start from instead, one tensor a parameter.

    Raises:
        InputError: `lr` is no number above 0, or `lrs` do not fit the parameters.

    Example:
        >>> [tuple(rate.shape) for rate in MetaSGD(nn.Linear(4, 2), lr=0.1).lrs]
        [(2, 4), (2,)]
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, first_order: bool = False, lrs: Any = None, **options: Any
    ) -> None:
        super().__init__(model, lr, first_order, **options)
        parameters = list(model.parameters())
        start = float(checked_rate("lr", lr, ()))
        rates = [torch.full_like(p, start) for p in parameters] if lrs is None else list(lrs)
        if [r.shape for r in rates] != [p.shape for p in parameters]:
            raise InputError(f"lrs must be one tensor of the same shape for each of {len(parameters)} parameters")
        self.lrs = nn.ParameterList([nn.Parameter(rate.detach().clone()) for rate in rates])

    def _rates(self) -> Any:
        names = [name for name, _ in self.module.named_parameters()]
        return dict(zip(names, self.lrs, strict=True))
