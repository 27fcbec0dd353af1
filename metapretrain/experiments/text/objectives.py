"""Objectives and heads of text tasks, the step that trains them together, and gradient surgery (PCGrad).

Yu et al. (2020), "Gradient surgery for multi-task learning", algorithm 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metapretrain.checks import decisive
from metapretrain.data.texts import TextTask
from metapretrain.data.tokens import Tokens
from metapretrain.distributed import mean_over_ranks
from metapretrain.experiments.images.objectives import WeightedLosses
from metapretrain.experiments.text.recipe import TextMethod, one_sequence
from metapretrain.models.text_encoders import ClassHead, CosineHead, PairHead, share_hidden
from metapretrain.nests import evaluation_mode
from metapretrain.protonet import ProtoLoss, gather_rows, proto_logits, prototypes
from metapretrain.protonet.loss import divergence
from metapretrain.protonet.prototypes import wide_dtype


def task_gradients(losses: Sequence[Tensor], shared: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the gradient of each loss for each shared parameter; the graph is kept."""
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return [list(torch.autograd.grad(loss, shared, **options)) for loss in losses]


def dot_products(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the float32 matrix (T, T) of the dot products of T gradients."""
    flat = [torch.cat([part.flatten().float() for part in gradient]) for gradient in gradients]
    return torch.stack([torch.stack([(a * b).sum() for b in flat]) for a in flat])


def cosines(products: Tensor) -> Tensor:
    """Return the cosines (T, T) of gradients from their dot products; 0 beside a gradient that vanishes."""
    norms = products.diagonal().clamp_min(0).sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, products / scale.clamp_min(torch.finfo(products.dtype).tiny), 0)


def projection_weights(products: Tensor, order: Tensor) -> Tensor:
    """Return how much of each task's gradient PCGrad's sum holds, (T,), from their dot products (T, T).

    Each task's gradient g_i meets the others in its own order, row i of `order`: int64 (T, T), a permutation of 0..T-1
    per row. Where g_i . g_j < 0, it loses its part along g_j.
    """
    tasks = torch.arange(len(products), device=products.device)
    mixed = torch.eye(len(products), dtype=products.dtype, device=products.device)
    for met in order.unbind(1):
        other = F.one_hot(met, len(products))
        dots = ((mixed @ products) * other).sum(1)
        norms = products.diagonal()[met]
        conflict = (dots < 0) & (met != tasks) & (norms > 0)
        share = torch.where(conflict, dots / norms.clamp_min(torch.finfo(products.dtype).tiny), 0)
        mixed = mixed - share[:, None] * other
    return mixed.sum(0)


def pcgrad(losses: Mapping[str, Tensor], shared: Sequence[Tensor], order: Tensor | None = None) -> dict[str, Tensor]:
    """Return losses of the same values whose summed gradient is PCGrad's for the `shared` parameters of all tasks.

    All other parameters, the heads, keep their own gradient. Over ranks, whose gradients are averaged afterwards, the
    projections are those of the gradients of the whole batch. `order`: see :func:`projection_weights`; None: random.
    """
    gradients = [mean_over_ranks(own) for own in task_gradients(list(losses.values()), shared)]
    products = dot_products(gradients)
    if order is None:
        # The ranks draw different numbers: the order of their means is as random, and the same for all.
        order = mean_over_ranks([torch.rand(products.shape, device=products.device)])[0].argsort(1)
    change = projection_weights(products, order) - 1
    correction = torch.zeros((), device=products.device)
    for parameter, parts in zip(shared, zip(*gradients, strict=True), strict=True):
        difference = sum(weight * part for weight, part in zip(change, parts, strict=True))
        correction = correction + (parameter * difference).sum()
    first = next(iter(losses))
    return {**losses, first: losses[first] + correction - correction.detach()}


Encoded = Sequence[Tensor]  # (B, D) of a sentence or a joined pair, or of both sentences of a pair


@dataclass(frozen=True)
class Output:
    """What a saved model knows of a task: enough to build its head; the names are those of a TextTask."""

    name: str
    kind: str
    classes: tuple[str, ...]
    low: float
    high: float
    num_classes: int

    @property
    def regression(self) -> bool:
        return self.kind.endswith("regression")


class TextRows(nn.Module):
    """Tokens, labels and classes of a training set; they follow the module to its device, no part of its state.

    `features` are embeddings (N, D) of the rows, one or two, where the encoder is frozen: it need not run again.
    `ordinal`: the classes of scores are :func:`shares_of`.
    """

    def __init__(self, task: TextTask, tokens: Tokens, features: Encoded | None = None, ordinal: bool = False) -> None:
        super().__init__()
        self.kind, self.tokens = task.kind, tokens
        self.labels, self.classes = task.train.require_labels(), task.class_labels(task.train)
        if ordinal and task.regression:
            self.classes = shares_of(self.labels - task.low, task.num_classes)
        self.features = None if features is None else list(features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TextRows:
        # no buffers: they would be in every checkpoint
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.labels, self.classes = fn(self.labels), fn(self.classes)
        self.tokens = self.tokens.to(self.labels.device)
        if self.features is not None:
            self.features = [fn(part) for part in self.features]
        return self

    def inputs(self, rows: Tensor, width: int) -> list[dict[str, Tensor]]:
        """Return the encoder's input (B, width) of `rows` (B,): one, or two where pairs are encoded separately."""
        parts = [self.tokens] if self.tokens.second is None else [self.tokens, self.tokens.second]
        return [part.gather(rows, width) for part in parts]


class TextObjective(nn.Module, ABC):
    """What an encoder of texts is trained by, given the embeddings of a batch of the rows in `texts`."""

    def __init__(self, texts: TextRows) -> None:
        super().__init__()
        self.texts = texts

    @abstractmethod
    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        """Return the scalar loss of `rows` (B,) with embeddings `z`."""

    @abstractmethod
    def doubled(self, z: Encoded, rows: Tensor, rdrop: float) -> Tensor:
        """The loss of rows that are there twice, first half and second, and how much the halves disagree (R-Drop)."""


def shares_of(scores: Tensor, classes: int) -> Tensor:
    """Return how much of each score 0..C-1, (N,), belongs to each class, (N, C): its expected class is the score.

    Tai et al. (2015), "Improved semantic representations from tree-structured LSTM networks", section 4.2.
    """
    return (1 - (scores[:, None] - torch.arange(classes, device=scores.device)).abs()).clamp_min(0)


def ordinal_prototypes(z: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Means (C, D) of embeddings (N, D) weighted by :func:`shares_of`, and which classes have any weight, bool (C,)."""
    wide = shares.to(wide_dtype(z))  # which autocast leaves alone
    weights = wide.sum(0)
    present = weights > 0
    return (wide.T @ z.to(wide.dtype)) / torch.where(present, weights, 1)[:, None], present


def task_prototypes(task: TextTask, z: Tensor, ordinal: bool) -> Tensor:
    """Prototypes (C, D) of `task.train` with embeddings z (N, D), NaN without rows; `ordinal`: weighted, of scores."""
    if ordinal and task.regression:
        scores = task.train.require_labels().to(z.device) - task.low
        centres, present = ordinal_prototypes(z, shares_of(scores, task.num_classes))
    else:
        centres, present = prototypes(z, task.class_labels(task.train).to(z.device), task.num_classes)
    return torch.where(present[:, None], centres, torch.nan).float()


def prototype_outputs(task: TextTask | Output, z: Tensor, centres: Tensor, ordinal: Mapping[str, Any] | None) -> Tensor:
    """Logits (M, C) of embeddings (M, D) by :func:`task_prototypes` (C, D): negative squared distances.

    Of a regression, scores float32 (M,): that of the nearest prototype, or with `ordinal`, a distance and a
    temperature, the expected one. InputError: embeddings that are not finite.
    """
    how = ordinal if ordinal and task.regression else {"distance": "sqeuclidean"}
    logits = decisive(proto_logits(z, centres.nan_to_num(), present=~centres.isnan().any(1), **how)).cpu().double()
    if not task.regression:
        return logits
    classes = torch.arange(len(centres)).double()
    return ((logits.softmax(1) @ classes if ordinal else classes[logits.argmax(1)]) + task.low).float()


class TextPrototypes(TextObjective):
    """The prototypical loss of a task's classes (text paper, section 4.3); separate embeddings are added (A.2)."""

    def __init__(self, texts: TextRows, proto: ProtoLoss) -> None:
        super().__init__(texts)
        self.proto = proto

    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        loss: Tensor = self.proto(added(z), self.texts.classes[rows])
        return loss

    def doubled(self, z: Encoded, rows: Tensor, rdrop: float) -> Tensor:
        one, other = added(z).chunk(2)
        return self.proto.doubled(one, other, self.texts.classes[rows.chunk(2)[0]], rdrop)


class TextOrdinal(TextPrototypes):
    """Ordered prototypes of scores: means weighted by :func:`shares_of`, which are also what is predicted.

    A score between two classes moves both of their prototypes and is drawn between them; its prediction is the
    expected class under the softmax. Distance, temperature, smoothing and ranks are those of `proto`.
    """

    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        return self._scored(added(z), rows)[0]

    def doubled(self, z: Encoded, rows: Tensor, rdrop: float) -> Tensor:
        halves = zip(added(z).chunk(2), rows.chunk(2), strict=True)
        (loss, logits), (other, others) = (self._scored(*half) for half in halves)
        return (loss + other) / 2 + rdrop * divergence(logits, others).mean()

    def _scored(self, z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        proto, shares = self.proto, self.texts.classes[rows]
        if proto.gather:
            z, shares = gather_rows(z), gather_rows(shares)
        centres, present = ordinal_prototypes(z, shares)
        logits = proto_logits(z, centres, proto.distance, proto.temperature, present)
        target = (1 - proto.label_smoothing) * shares + proto.label_smoothing * present / present.sum()
        return F.cross_entropy(logits, target.to(logits.dtype)), logits


class TextLabels(TextObjective):
    """The paper's loss of a task under its head (section 5.3), one of :func:`build_heads`.

    Cross entropy of classes, binary cross entropy with a sigmoid for pairs of two classes, mean squared error of
    scores. `label_smoothing`, in [0, 1), is of cross entropy.
    """

    def __init__(self, texts: TextRows, head: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__(texts)
        self.head, self.label_smoothing = head, label_smoothing
        self.scores = texts.kind.endswith("regression")

    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        return self._loss(self._outputs(z), rows)

    def doubled(self, z: Encoded, rows: Tensor, rdrop: float) -> Tensor:
        outputs = self._outputs(z)
        return self._loss(outputs, rows) + rdrop * disagreement(outputs, self.scores)

    def _outputs(self, z: Encoded) -> Tensor:
        outputs: Tensor = self.head(*z).float()
        return outputs

    def _loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        labels = self.texts.labels[rows]
        if self.scores:
            return F.mse_loss(outputs, labels)
        if outputs.ndim > 1:
            return F.cross_entropy(outputs, labels, label_smoothing=self.label_smoothing)
        wanted = labels.float() * (1 - self.label_smoothing) + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs, wanted)


class TextClasses(TextLabels):
    """The control: cross entropy of a linear head over the same classes (or shares) as the prototypes."""

    def __init__(self, texts: TextRows, head: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__(texts, head, label_smoothing)
        self.scores = False

    def _outputs(self, z: Encoded) -> Tensor:
        return super()._outputs([added(z)])

    def _loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return F.cross_entropy(outputs, self.texts.classes[rows], label_smoothing=self.label_smoothing)


def disagreement(outputs: Tensor, scores: bool) -> Tensor:
    """Mean KL divergence, both ways, of halves of outputs (2B, C) or (2B,); squared difference of scores: R-Drop."""
    if scores:
        one, other = outputs.chunk(2)
        return F.mse_loss(one, other)
    logits = outputs if outputs.ndim > 1 else torch.stack([torch.zeros_like(outputs), outputs], 1)
    return divergence(*logits.chunk(2)).mean()


def added(z: Encoded) -> Tensor:
    """Return one embedding (B, D) a row: that of the text, or the sum of both sentences' (appendix A.2)."""
    return z[0] if len(z) == 1 else z[0] + z[1]


def build_heads(tasks: Sequence[TextTask | Output], method: TextMethod, sts_head: str, features: int) -> nn.ModuleDict:
    """Build a head over D = `features` for each task: appendix A.1.1, or Dropout and a linear layer over joined pairs.

    The method tells how pairs are encoded and which heads share their hidden layers; where nothing is trained, only
    heads without parameters are built. `sts_head` is `mlp` or `cosine`, where the method leaves it open.
    """
    heads: dict[str, nn.Module] = {}
    shared: PairHead | None = None
    for task in tasks:
        binary = task.kind == "pair-classification" and task.num_classes == 2
        outputs = 1 if task.regression or binary else task.num_classes
        if not task.kind.startswith("pair") or one_sequence(method, task.kind):
            heads[task.name] = ClassHead(features, outputs)
        elif task.regression and (method.sts or sts_head) == "cosine":
            heads[task.name] = CosineHead(task.low, task.high)
        else:
            head = PairHead(features, outputs, method.combine)
            if method.shared and shared is not None:
                share_hidden(shared, head)
            shared = head
            heads[task.name] = head
    return nn.ModuleDict({name: head for name, head in heads.items() if method.trained or not list(head.parameters())})


def head_predictions(task: TextTask | Output, head: nn.Module, z: Encoded) -> Tensor:
    """Return predicted classes int64 (N,), or scores float32 (N,), of embeddings (N, D)."""
    outputs: Tensor = decisive(head(*z).float())
    if task.regression:
        return outputs
    return outputs.argmax(1) if outputs.ndim > 1 else (outputs > 0).long()


class TextStep(WeightedLosses[TextObjective]):
    """The losses of one update; the rows of tasks whose batches have one width go through the encoder together.

    The model takes {"input_ids", "attention_mask", ...} (B, L) to features (B, D); `surgery`: PCGrad on its parameters;
    `rdrop`: rows go through it twice, and how much the two disagree is added with this weight.
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Mapping[str, TextObjective],
        weights: Mapping[str, float] | None = None,
        surgery: bool = False,
        rdrop: float | None = None,
    ) -> None:
        super().__init__(model, objectives, weights)
        self.surgery, self.rdrop = surgery, rdrop or 0.0

    @property
    def texts(self) -> dict[str, TextRows]:
        """Tokens and labels of each task's training rows."""
        return {name: self.objective(name).texts for name in self.objectives}

    def forward(self, batches: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `{name: weighted loss}` for `{name: {"rows": (B,), "width": (L, 0)}}`."""
        if self.rdrop:
            batches = {name: {**batch, "rows": batch["rows"].repeat(2)} for name, batch in batches.items()}
        if not self.surgery:
            return self.losses(batches, self.encode(batches), self.rdrop)
        # Each task by itself: the backward pass of a task then has its own rows only.
        losses: dict[str, Tensor] = {}
        for name, batch in batches.items():
            losses |= self.losses({name: batch}, self.encode({name: batch}), self.rdrop)
        return pcgrad(losses, list(self.model.parameters()))

    def losses(self, batches: Mapping[str, Any], z: Mapping[str, Encoded], rdrop: float = 0.0) -> dict[str, Tensor]:
        found = {}
        for name, batch in batches.items():
            objective, rows = self.objective(name), batch["rows"]
            loss = objective.doubled(z[name], rows, rdrop) if rdrop else objective.loss(z[name], rows)
            found[name] = self.weights.get(name, 1.0) * loss
        return found

    def encode(self, batches: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Embed the rows of each task, one pass through the encoder a width."""
        all_texts = self.texts
        found: dict[str, list[Tensor]] = {}
        waiting: dict[int, list[tuple[str, dict[str, Tensor]]]] = {}
        for name, batch in batches.items():
            texts = all_texts[name]
            rows, width = batch["rows"], batch["width"].shape[0]
            found[name] = [] if texts.features is None else [part[rows] for part in texts.features]
            if texts.features is None:
                waiting.setdefault(width, []).extend((name, part) for part in texts.inputs(rows, width))
        for parts in waiting.values():
            z = self.model(_stacked([part for _, part in parts]))
            for (name, _), own in zip(parts, z.split([len(part["input_ids"]) for _, part in parts]), strict=True):
                found[name].append(own)
        return found

    def conflict(self, batches: Mapping[str, Any]) -> dict[str, float]:
        """Return the cosines between the gradients of each two tasks' losses over the encoder's parameters.

        As {"gradient_cosine_sst_para": ...}; below 0 they conflict. In evaluation mode: dropout takes no part. Every
        rank looks at the whole batches. Waits for the device.
        """
        counters = [(buffer, buffer.clone()) for buffer in self.objectives.buffers()]
        gathering = [part for part in self.objectives.modules() if isinstance(part, ProtoLoss) and part.gather]
        for proto in gathering:
            proto.gather = False
        names, parameters = list(batches), [p for p in self.model.parameters() if p.requires_grad]
        gradients = []
        with evaluation_mode(self), torch.compiler.set_stance("force_eager"):  # compiled code goes back once only
            for name in names:  # one graph at a time
                loss = self.losses({name: batches[name]}, self.encode({name: batches[name]}))[name]
                gradients += task_gradients([loss], parameters)
        found = cosines(dot_products(gradients)).tolist()
        for proto in gathering:
            proto.gather = True
        for buffer, value in counters:  # calls in which nothing could be scored are counted: these are none of training
            buffer.copy_(value)
        pairs = combinations(range(len(names)), 2)
        return {f"gradient_cosine_{names[i]}_{names[j]}": found[i][j] for i, j in pairs}


def _stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: torch.cat([part.get(key, torch.zeros_like(part["input_ids"])) for part in parts]) for key in keys}
