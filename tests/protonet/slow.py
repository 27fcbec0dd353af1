"""Slow loops to test against: the papers' steps, one example at a time, in plain Python and float64."""

from __future__ import annotations

import torch
from torch import Tensor

MASK = (1 << 64) - 1


def distance(a: Tensor, b: Tensor, name: str) -> Tensor:
    if name == "cosine":
        return -(a @ b) / (a.norm() * b.norm())
    squared = ((a - b) ** 2).sum()
    return squared if name == "sqeuclidean" else squared.sqrt()


def loss(
    z: Tensor,
    y: list[int],
    *,
    support: list[int],
    query: list[int],
    name: str = "euclidean",
    temperature: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor | None:
    """Appendix A.2 of the text paper with separate support and query rows; None if no query can be scored."""
    label_map = {label: i for i, label in enumerate(sorted({y[row] for row in support}))}
    class_vectors: dict[int, list[Tensor]] = {}
    for row in support:
        class_vectors.setdefault(label_map[y[row]], []).append(z[row])
    centres = [torch.stack(class_vectors[key]).mean(0) for key in sorted(class_vectors)]
    losses = []
    for row in query:
        if y[row] not in label_map:
            continue
        logits = torch.stack([-distance(z[row], centre, name) / temperature for centre in centres])
        log_p = logits - torch.logsumexp(logits, 0)
        losses.append(-(1 - smoothing) * log_p[label_map[y[row]]] - smoothing * log_p.mean())
    return torch.stack(losses).mean() if losses else None


def leave_one_out(
    z: Tensor,
    y: list[int],
    *,
    earlier: tuple[Tensor, list[int]] | None = None,
    name: str = "euclidean",
    temperature: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor | None:
    """Every row is a query, its own prototype without it; `earlier` are further rows of the prototypes."""
    all_z, all_y = (z, y) if earlier is None else (torch.cat([z, earlier[0]]), y + earlier[1])
    losses = []
    for row in range(len(y)):
        log_odds, own = [], None
        for label in sorted(set(all_y)):
            others = [i for i in range(len(all_y)) if all_y[i] == label and i != row]
            if label == y[row]:
                own = len(log_odds)
            if not others:
                break
            log_odds.append(-distance(z[row], all_z[others].mean(0), name) / temperature)
        else:
            log_p = torch.stack(log_odds).log_softmax(0)
            losses.append(-(1 - smoothing) * log_p[own] - smoothing * log_p.mean())
    return torch.stack(losses).mean() if losses else None


def mix(x: int) -> int:
    """SplitMix64's finaliser on unsigned whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def keys(seed: int, call: int, rows: int) -> list[int]:
    start = mix(seed & MASK)
    unsigned = [mix((start + ((call << 32) + row) * 0x9E3779B97F4A7C15) & MASK) for row in range(rows)]
    return [key - (1 << 64) if key >> 63 else key for key in unsigned]


def split(seed: int, call: int, y: list[int], fraction: float, stratified: bool) -> tuple[list[int], list[int]]:
    """Support and query rows of one call."""
    key = keys(seed, call, len(y))
    query: list[int] = []
    if stratified:
        for label in set(y):
            rows = sorted((row for row in range(len(y)) if y[row] == label), key=lambda row: key[row])
            query += rows[: min(len(rows) - 1, max(1, round(fraction * len(rows))))]
    else:
        rows = sorted(range(len(y)), key=lambda row: key[row])
        query = rows[: max(1, min(len(y) - 1, round(fraction * len(y))))]
    return [row for row in range(len(y)) if row not in query], sorted(query)
