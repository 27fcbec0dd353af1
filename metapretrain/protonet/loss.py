"""The prototypical pretraining loss in its three modes, over a batch or an epoch's prototypes."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from metapretrain.checks import number, whole
from metapretrain.distributed import gather_rows
from metapretrain.draws import split_keys, stratified_queries
from metapretrain.errors import InputError, one_of
from metapretrain.protonet.prototypes import (
    DISTANCES,
    IGNORED,
    MOST,
    check_shapes,
    check_temperature,
    class_ids,
    class_sums,
    dense_ids,
    masked,
    result_dtype,
    unlabelled,
    wide_dtype,
    wide_logits,
)

MODES = ("standard", "query", "leave-one-out")


def check_labels(y: Tensor | Sequence[int] | Any, *, mode: str = "standard", num_classes: int | None = None) -> Tensor:
    """Check that the prototypical loss can use these labels, and return them as int64 (B,).

    The loss itself never looks at label values, because that would wait for the device.

    Args:
        y: (B,) whole numbers on the CPU: tensor, array or list. With `gather=True`, those of all ranks together.
        mode, num_classes: those of the loss; with the latter, labels are 0..num_classes-1.

    Raises InputError: not one-dimensional, empty, not whole numbers, not on the CPU, -1 or -100, outside
    0..num_classes-1; in the other modes, no class with 2 examples (no query could have a prototype).

    Example:
        >>> check_labels([3, 3, 8], mode="query").tolist()
        [3, 3, 8]
        >>> check_labels([0, 1, 2], mode="query")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: every class of the batch has one example (3 rows, 3 classes), so in \
query mode no query has a prototype; use larger or class-balanced batches, or mode="standard"
    """
    one_of("mode", mode, MODES)
    try:
        labels = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"labels are a {type(y).__name__} that makes no tensor; give whole numbers (B,)") from None
    if labels.device.type != "cpu":
        raise InputError(f"labels are on {labels.device}; check them on the CPU, before they are moved")
    if labels.dim() != 1 or labels.numel() == 0:
        raise InputError(f"labels have shape {tuple(labels.shape)}; give (B,) with B at least 1")
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"labels are {labels.dtype}; give whole numbers, for example y.long()")
    labels = labels.long()
    low, high = int(labels.min()), int(labels.max())
    if num_classes is not None and (low < 0 or high >= num_classes):
        told = f"labels run from {low} to {high} but num_classes={num_classes} allows 0 to {num_classes - 1}"
        raise InputError(f"{told}; raise num_classes, or leave unlabelled rows (-1) out")
    if (none := int(unlabelled(labels).sum())) > 0:
        raise InputError(f"{none} of {len(labels)} labels are -1 or {IGNORED} (no label); leave these rows out")
    if mode != "standard" and (classes := int(torch.unique(labels).numel())) == len(labels):
        raise InputError(
            f"every class of the batch has one example ({len(labels)} rows, {classes} classes), "
            f'so in {mode} mode no query has a prototype; use larger or class-balanced batches, or mode="standard"'
        )
    return labels


def query_count(rows: int, query_fraction: float) -> int:
    """Number of queries in a batch of `rows`: the rounded fraction, but never an empty side."""
    return max(1, min(rows - 1, round(query_fraction * rows)))


def random_queries(keys: Tensor, query_fraction: float) -> Tensor:
    """The :func:`query_count` rows (Q,) with the lowest keys."""
    return torch.argsort(keys)[: query_count(len(keys), query_fraction)]


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """Mean of the KL divergences, both ways, of the softmaxes of two logits (B, C): (B,), as in R-Drop.

    Example:
        >>> divergence(torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])).item()  # (1/2, 1/2) and (0.119, 0.881)
        0.3807970881462097
    """
    p, q = logits.log_softmax(1), other.log_softmax(1)
    return ((p.exp() - q.exp()) * (p - q)).sum(1) / 2


_MEMORY = ("memory_sums", "memory_counts")
_Scores = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


class ProtoLoss(nn.Module):
    """Cross-entropy of examples against the prototypes of their batch.

    Steps 1 to 4 of the vision paper; query mode, squared distance: the loss of Snell et al. (2017), eq. 1 and 2.

    ``mode="standard"`` (text paper, appendix A.2): prototypes and loss from the whole batch, an example is part of its
    own prototype. ``mode="query"`` (vision paper): prototypes from the support rows, loss on the query rows; a query
    whose class has no prototype is left out of the mean. The split is a function of (seed, call, row): the buffer
    `calls` counts training calls, so a restored state_dict continues the sequence, and evaluation does not disturb it.
    ``mode="leave-one-out"``: every row is a query, and the prototype of its own class is the mean of the class's other
    rows; a row that is alone in its class is a prototype for the others and is left out of the mean.

    On a GPU the forward pass has static shapes and reads nothing back: it can be captured in a CUDA graph and compiled.
    Rows with NaN or infinity (or whose squares would be), and labels -1 or -100 (no label) or outside 0..num_classes-1,
    are left out of prototypes and loss; the first such call, or one in which nothing could be scored (loss 0), is kept
    on the device until :meth:`check`.

    Args:
        mode: one of :data:`MODES`.
        query_fraction: of query mode, in (0, 1): of B rows :func:`query_count` are queries.
        stratified: take the fraction inside each class; a class of one example goes to the support.
        distance: one of :data:`DISTANCES`.
        temperature, learn_temperature: above 0; whether its logarithm is learned from there (`log_temperature`).
        num_classes: C; labels are then 0..C-1. None: labels are any other whole numbers. On a GPU, C is then the batch
            size (absent classes take no part), which costs more when there are few classes.
        memory: ``"epoch"`` adds the sums of the epoch's earlier prototype rows, without gradient: a prototype is the
            mean over the epoch so far and only the batch's share carries gradient. Needs num_classes; call
            :meth:`reset_epoch` when an epoch begins. Not changed in evaluation mode.
        gather: use the rows of all ranks, equally many each; averaged gradients equal one process's.
        label_smoothing, seed: in [0, 1), spread over the present classes; seed of the query split.

    Raises InputError: a bad value, in the constructor or for the shapes given to forward.

    Example:
        >>> z, y = torch.tensor([[0.0], [2.0], [10.0], [12.0]]), torch.tensor([5, 5, 9, 9])
        >>> round(ProtoLoss()(z, y).item(), 4)
        0.0002
    """

    calls: Tensor
    first_bad: Tensor
    bad_counts: Tensor
    memory_sums: Tensor | None
    memory_counts: Tensor | None

    def __init__(
        self,
        mode: str = "standard",
        *,
        query_fraction: float = 0.25,
        stratified: bool = False,
        distance: str = "euclidean",
        temperature: float = 1.0,
        learn_temperature: bool = False,
        num_classes: int | None = None,
        memory: str | None = None,
        gather: bool = False,
        label_smoothing: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.mode = one_of("mode", mode, MODES)
        self.distance = one_of("distance", distance, DISTANCES)
        self.memory = None if memory is None else one_of("memory", memory, ["epoch"])
        self.query_fraction = number("query_fraction", query_fraction, above=0, below=1)
        self.label_smoothing = number("label_smoothing", label_smoothing, least=0, below=1)
        check_temperature(temperature)
        if num_classes is not None:
            whole("num_classes", num_classes, 1, MOST)
        elif memory is not None:
            raise InputError('memory="epoch" keeps a prototype for each class: give num_classes as well')
        if not isinstance(seed, int):
            raise InputError(f"seed is {seed!r}; give a whole number")
        self.stratified, self.gather, self.num_classes, self.seed = stratified, gather, num_classes, seed
        self.log_temperature: nn.Parameter | None = None
        if learn_temperature:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.start_temperature = temperature
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("first_bad", torch.tensor(-1))
        # Bad calls, rows not finite, labels out of range, calls in which nothing was scored.
        self.register_buffer("bad_counts", torch.zeros(4, dtype=torch.int64))
        for name in _MEMORY:
            self.register_buffer(name, None)

    @property
    def temperature(self) -> float | Tensor:
        """The temperature in use: the number given, or a 0-d tensor that carries the gradient if learned."""
        return self.start_temperature if self.log_temperature is None else self.log_temperature.exp()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Loss of embeddings (B, D) with labels (B,): a float32 scalar (float64 for float64 input)."""
        return self._recorded(self._scores(z, y))

    def doubled(self, z: Tensor, other: Tensor, y: Tensor, rdrop: float) -> Tensor:
        """Loss of two passes (B, D) of the same rows under dropout, whose predictions are to agree (R-Drop).

        The mean of both losses, each with its own prototypes and the same queries, plus `rdrop` times the mean
        :func:`divergence` of the scored rows (Liang et al., 2021, equation 4).
        """
        one, two = self._scores(z, y), self._scores(other, y)
        apart, scored = divergence(one[0], two[0]), one[2]
        if scored is not None:
            apart = torch.where(scored, apart, 0) * (len(apart) / scored.sum().clamp_min(1))
        return (self._recorded(one) + self._recorded(two)) / 2 + rdrop * apart.mean()

    def _recorded(self, scores: _Scores) -> Tensor:
        logits, target, scored, present, finite, valid = scores
        loss = _mean_cross_entropy(logits, target, scored, present, self.label_smoothing)
        self._record(finite, valid, scored)
        return loss

    def _scores(self, z: Tensor, y: Tensor) -> _Scores:
        """Logits (Q, C), targets and which are scored (Q,), which classes are present (C,), and which rows are bad."""
        check_shapes(z, y)
        if self.gather:
            z, y = gather_rows(z), gather_rows(y)
        if self.mode != "standard" and len(z) < 2:
            raise InputError(f"{self.mode} mode needs other rows for the prototypes, got {len(z)} row; give at least 2")
        dtype, wide = result_dtype(z), wide_dtype(z)
        finite = _finite_rows(z, self.distance)
        z = (z if finite is None else torch.where(finite[:, None], z, 0)).to(wide)
        ids, valid, classes = self._class_ids(y)
        ids = ids if finite is None else torch.where(finite, ids, classes)
        support, rows, ids = self._split(ids, classes)
        sums, counts = self._sums(z, support, classes)
        present, centres = counts > 0, sums / counts.clamp_min(1)[:, None]
        queries = z if rows is None else z.index_select(0, rows)
        logits = masked(wide_logits(queries, centres, self.distance, self.temperature, dtype), present)
        target, scored = ids, None
        if self.mode == "leave-one-out":
            target = ids.clamp_max(classes - 1)
            own = ids[:, None] == torch.arange(classes, device=ids.device)  # products with it are the same bits always
            others = own.to(wide) @ counts - 1
            centres, scored = (own.to(wide) @ sums - z) / others.clamp_min(1)[:, None], others > 0
            to_others = wide_logits(z, centres, self.distance, self.temperature, dtype, paired=True)
            logits = torch.where(own, to_others[:, None], logits)
        elif not (self.mode == "standard" and finite is None and valid is None):
            target = ids.clamp_max(classes - 1)
            scored = (ids < classes) & present[target]
        return logits, target, scored, present, finite, valid

    def _class_ids(self, y: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """Ids 0..C, where C belongs to no class; which labels are valid, or None if all are; and C."""
        y = y.long()
        if self.num_classes is None and _is_readable(y):  # C need not be as large as the batch
            known = ~unlabelled(y)
            labels, ids = torch.unique(y[known], return_inverse=True)
            if len(ids) == len(y):
                return ids, None, len(labels)
            classes = max(1, len(labels))
            return torch.full_like(y, classes).masked_scatter(known, ids), known, classes
        if self.num_classes is None:
            return torch.where(unlabelled(y), len(y), dense_ids(y)), ~unlabelled(y), len(y)
        if _is_readable(y):
            low, high = torch.aminmax(y)
            if low >= 0 and high < self.num_classes:
                return y, None, self.num_classes
        return *class_ids(y, self.num_classes), self.num_classes

    def _split(self, ids: Tensor, classes: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Ids of the support; the rows to score, or None for all; and their ids. C takes no part."""
        if self.mode != "query":
            return ids, None, ids
        keys = split_keys(self.seed, self.calls, len(ids))
        if self.stratified:
            query = stratified_queries(keys, ids, self.query_fraction)
            return torch.where(query, classes, ids), None, torch.where(query, ids, classes)
        rows = random_queries(keys, self.query_fraction)
        return ids.index_fill(0, rows, classes), rows, ids[rows]

    def _sums(self, z: Tensor, support: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Sums (C, D) and counts (C,) of the prototype rows: those of the epoch, with memory."""
        sums, counts = class_sums(z, support, classes)
        if self.memory is None:
            return sums, counts
        if self.memory_sums is None or self.memory_counts is None:
            if not self.training:
                return sums, counts
            self.memory_sums, self.memory_counts = torch.zeros_like(sums), torch.zeros_like(counts)
        if self.memory_sums.shape != sums.shape:
            kept = self.memory_sums.shape[1]
            raise InputError(f"embeddings have {sums.shape[1]} features, earlier ones {kept}; make a loss for each")
        sums, counts = sums + self.memory_sums, counts + self.memory_counts
        if self.training:
            with torch.no_grad():
                self.memory_sums.copy_(sums)
                self.memory_counts.copy_(counts)
        return sums, counts

    @torch.no_grad()
    def _record(self, finite: Tensor | None, valid: Tensor | None, scored: Tensor | None) -> None:
        """Count what was left out, on the device, and remember the first call in which anything was."""
        good = finite is None and valid is None
        if not (good and (scored is None or (_is_readable(scored) and bool(scored.any())))):
            none = torch.zeros_like(self.calls)
            rows, labels = (none if mask is None else (~mask).sum() for mask in (finite, valid))
            empty = none if scored is None else (~scored.any()).long()
            bad = rows + labels + empty > 0
            self.bad_counts.add_(torch.stack([bad.long(), rows, labels, empty]))
            self.first_bad.copy_(torch.where(bad & (self.first_bad < 0), self.calls, self.first_bad))
        if self.training:
            self.calls.add_(1)

    def check(self) -> None:
        """Raise for what the loss had to leave out so far; it waits for the device, so call it when a step is logged.

        InputError: embeddings with NaN or infinity, labels out of range, or calls that scored nothing; it names the
        first call (counted from 0) and how many.
        """
        calls, rows, labels, empty = self.bad_counts.tolist()
        if calls == 0:
            return
        parts = []
        if rows:
            parts.append(f"{rows} embedding rows with NaN or infinity, or too large (lower the learning rate or clip)")
        if labels:
            known = f"-1 or {IGNORED}" if self.num_classes is None else f"outside 0..{self.num_classes - 1}"
            parts.append(f"{labels} labels {known} (see check_labels)")
        if empty:
            parts.append(f"{empty} calls in which no example had a prototype (use larger batches)")
        first = int(self.first_bad)
        raise InputError(f"prototypical loss: first bad call {first}, {calls} in all: {'; '.join(parts)}")

    @torch.no_grad()
    def reset_epoch(self) -> None:
        """Forget the epoch's prototypes; nothing to do without memory."""
        for name in _MEMORY:
            kept = getattr(self, name)
            if kept is not None:
                kept.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The memory is made by the first call, when D is known: make or drop it to match what was saved.
        for name in _MEMORY:
            saved = state_dict.get(prefix + name)
            kept = getattr(self, name)
            if saved is None or kept is None or kept.shape != saved.shape:
                fresh = None if saved is None else torch.zeros_like(saved, device=self.calls.device)
                setattr(self, name, fresh)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The options that change the loss, for `print(model)`."""
        return f"{self.mode}, distance={self.distance}, num_classes={self.num_classes}, memory={self.memory}"


def _is_readable(x: Tensor) -> bool:
    """Whether reading a value costs nothing: no wait for a device, no break of a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _finite_rows(z: Tensor, distance: str) -> Tensor | None:
    """Which rows have distances that are finite (B,), or None if all have and it costs nothing to know."""
    z, dtype = z.detach(), result_dtype(z)
    if distance == "sqeuclidean" or dtype == torch.float64:
        fits = z.to(wide_dtype(z)).square().sum(1) < torch.finfo(dtype).max / 4  # |a - b| is at most |a| + |b|
        return None if _is_readable(z) and bool(fits.all()) else fits
    if _is_readable(z) and math.isfinite(z.sum(dtype=dtype).item()):
        return None
    return z.sum(1, dtype=wide_dtype(z)).isfinite()  # float64 sums of float32 numbers cannot overflow


def _mean_cross_entropy(
    logits: Tensor, target: Tensor, scored: Tensor | None, present: Tensor, smoothing: float
) -> Tensor:
    """Mean over the scored rows, all if None; 0 with zero gradient when there are none."""
    if scored is None and not smoothing:
        return cross_entropy(logits, target)
    if scored is None:
        scored = torch.ones_like(target, dtype=torch.bool)
    count = scored.sum().clamp_min(1)
    log_p = logits.log_softmax(1)
    loss = nll_loss(log_p, torch.where(scored, target, IGNORED), ignore_index=IGNORED, reduction="sum") / count
    if smoothing:
        uniform = -torch.where(present, log_p, 0).sum(1) / present.sum().clamp_min(1)
        loss = (1 - smoothing) * loss + smoothing * torch.where(scored, uniform, 0).sum() / count
    return loss
