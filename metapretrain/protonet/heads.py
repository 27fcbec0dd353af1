"""Heads: scores of queries from features of support rows, for many episodes at once."""

import torch
from torch import Tensor
from torch.nn import functional as F

from metapretrain.errors import InputError, one_of

HEADS = ("nearest", "normalised", "centred", "logistic")


def head_scores(
    head: str, support: Tensor, labels: Tensor, query: Tensor, ways: int, centre: Tensor | None = None
) -> Tensor:
    """Scores (B, Q, W) of queries z (B, Q, D) by support features (B, S, D) with labels (B, S), 0..W-1.

    `nearest`: minus the squared Euclidean distance to class means (Snell et al., 2017). `normalised`: of features of
    length 1. `centred`: of features less `centre` (D,), such as the mean of the training classes, then of length 1
    (SimpleShot: Wang et al., 2019). `logistic`: logits of :func:`logistic` on features of length 1 (Tian et al., 2020).
    A class without support has the score minus infinity.

    Example:
        >>> z = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])
        >>> [head_scores(head, z, torch.tensor([[0, 1]]), z[:, :1] / 9, 2).argmax(2).item() for head in HEADS[:2]]
        [1, 0]
    """
    one_of("head", head, HEADS)
    if head == "centred":
        if centre is None:
            raise InputError("head centred needs a centre: the mean of features of other classes")
        support, query = support - centre, query - centre
    if head != "nearest":
        support, query = F.normalize(support, dim=-1), F.normalize(query, dim=-1)
    member = F.one_hot(labels, ways).to(support.dtype)
    counts = member.sum(1)
    if head == "logistic":
        scores = F.pad(query, (0, 1), value=1.0) @ logistic(support, labels, ways).mT
    else:
        centres = member.mT @ support / counts.clamp(min=1)[..., None]
        scores = -torch.cdist(query, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
    return scores.masked_fill((counts == 0)[:, None], -torch.inf)


def logistic(z: Tensor, y: Tensor, ways: int, penalty: float = 1.0, steps: int = 200) -> Tensor:
    """Weights (..., W, D + 1) of multinomial logistic regression on rows z (..., S, D), labels y (..., S); bias last.

    The minimum of the summed cross entropy plus ``penalty / 2 |w|^2``, without the bias (scikit-learn's with
    ``C = 1 / penalty``), by `steps` of accelerated descent with the Hessian's upper bound (Boehning, 1992). Not
    differentiable.

    >>> w = logistic(torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1]), 2)
    >>> bool(w[0, 0] > 0), bool(w[1, 0] < 0)
    (True, True)
    """
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        z = z.float() if z.dtype != torch.float64 else z
        reduced = z.shape[-2] < z.shape[-1]
        basis, corner = torch.linalg.qr(z.mT) if reduced else (None, None)  # w lies in the span of the rows
        x = F.pad(z if corner is None else corner.mT, (0, 1), value=1.0)
        shrunk = torch.full(x.shape[-1:], penalty, dtype=x.dtype, device=x.device)
        shrunk[-1] = 0
        bound = 0.5 * x.mT @ x + torch.diag(shrunk.clamp(min=1e-6))
        factor, targets = torch.linalg.cholesky(bound), F.one_hot(y, ways).to(x.dtype)
        w = ahead = x.new_zeros(*x.shape[:-2], x.shape[-1], ways)
        for step in range(steps):
            slope = x.mT @ ((x @ ahead).softmax(-1) - targets) + shrunk[:, None] * ahead
            moved = ahead - torch.cholesky_solve(slope, factor)
            ahead = moved + step / (step + 3) * (moved - w)
            w = moved
        if basis is not None:
            w = torch.cat([basis @ w[..., :-1, :], w[..., -1:, :]], -2)
        return w.mT
