"""Objectives and heads of text tasks over tokens that stay on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from metapretrain.data.texts import TextTask
from metapretrain.data.tokens import Tokens
from metapretrain.models.text_heads import ClassHead, CosineHead, PairHead, share_hidden
from metapretrain.protonet import ProtoLoss
from metapretrain.tasks.text_methods import TextMethod

Encoded = Sequence[Tensor]  # (B, D) of a sentence or a joined pair, or of both sentences of a pair


class Outputs(Protocol):
    """What a head is built for: a :class:`metapretrain.data.texts.TextTask`, or what a saved model knows of one."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def kind(self) -> str:
        """`classification`, `pair-classification` or `pair-regression`."""
        ...

    @property
    def low(self) -> float:
        """Lowest score."""
        ...

    @property
    def high(self) -> float:
        """Highest score."""
        ...

    @property
    def regression(self) -> bool:
        """Whether predictions are scores."""
        ...

    @property
    def num_classes(self) -> int:
        """C."""
        ...


class TextRows(nn.Module):
    """Tokens, labels and classes of a training set; they follow the module to its device, no part of its state.

    Args:
        task: gives classes and labels.
        tokens: of `task.train`.
        features: embeddings (N, D) of the rows, one or two, where the encoder is frozen: it need not run again.
    """

    def __init__(self, task: TextTask, tokens: Tokens, features: Encoded | None = None) -> None:
        super().__init__()
        self.kind, self.tokens = task.kind, tokens
        self.labels, self.classes = task.train.require_labels(), task.class_labels(task.train)
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
    """What an encoder of texts is trained by, given the embeddings of a batch.

    Args:
        texts: where rows come from.
    """

    def __init__(self, texts: TextRows) -> None:
        super().__init__()
        self.texts = texts

    @abstractmethod
    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        """Return the scalar loss of `rows` (B,) with embeddings `z`."""


class Prototypes(TextObjective):
    """The prototypical loss of a task's classes (text paper, section 4.3); separate embeddings are added (A.2).

    Args:
        texts: where rows come from.
        proto: the loss, in standard or query mode.
    """

    def __init__(self, texts: TextRows, proto: ProtoLoss) -> None:
        super().__init__(texts)
        self.proto = proto

    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        """Return the prototypical loss of `rows` (B,)."""
        loss: Tensor = self.proto(added(z), self.texts.classes[rows])
        return loss


class Classes(TextObjective):
    """The control: cross entropy of a linear head over the same classes as :class:`Prototypes`."""

    def __init__(self, texts: TextRows, head: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__(texts)
        self.head, self.label_smoothing = head, label_smoothing

    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        """Return the mean cross entropy of `rows` (B,)."""
        logits = self.head(added(z)).float()
        return F.cross_entropy(logits, self.texts.classes[rows], label_smoothing=self.label_smoothing)


class Labels(TextObjective):
    """The paper's loss of a task under its head (section 5.3).

    Cross entropy of classes, binary cross entropy with a sigmoid for pairs of two classes, mean squared error of
    scores.

    Args:
        texts: where rows come from.
        head: of :func:`build_heads`.
        label_smoothing: of cross entropy; in [0, 1).
    """

    def __init__(self, texts: TextRows, head: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__(texts)
        self.head, self.label_smoothing = head, label_smoothing

    def loss(self, z: Encoded, rows: Tensor) -> Tensor:
        """Return the mean loss of `rows` (B,)."""
        outputs, labels = self.head(*z).float(), self.texts.labels[rows]
        if self.texts.kind == "pair-regression":
            return F.mse_loss(outputs, labels)
        if outputs.ndim > 1:
            return F.cross_entropy(outputs, labels, label_smoothing=self.label_smoothing)
        wanted = labels.float() * (1 - self.label_smoothing) + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs, wanted)


def added(z: Encoded) -> Tensor:
    """Return one embedding (B, D) a row: that of the text, or the sum of both sentences' (appendix A.2)."""
    return z[0] if len(z) == 1 else z[0] + z[1]


def build_heads(tasks: Sequence[Outputs], method: TextMethod, sts_head: str, features: int) -> nn.ModuleDict:
    """Build a head for each task: appendix A.1.1, or Dropout and one linear layer over joined pairs.

    Args:
        tasks: what the heads are of.
        method: tells how pairs are encoded and which heads share their hidden layers; where nothing is trained, only
            heads without parameters are built.
        sts_head: `mlp` or `cosine`, where the method leaves it open.
        features: D.

    Example:
        >>> from metapretrain.data.made_texts import made_tasks
        >>> heads = build_heads(made_tasks(), TextMethod(), "mlp", 384)
        >>> {name: sum(p.numel() for p in head.parameters()) for name, head in heads.items()}
        {'sst': 1925, 'para': 296065, 'sts': 296065}
    """
    heads: dict[str, nn.Module] = {}
    shared: PairHead | None = None
    for task in tasks:
        binary = task.kind == "pair-classification" and task.num_classes == 2
        outputs = 1 if task.regression or binary else task.num_classes
        if task.kind == "classification" or method.joined:
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


def predict(task: Outputs, head: nn.Module, z: Encoded) -> Tensor:
    """Return predicted classes int64 (N,), or scores float32 (N,), of embeddings (N, D)."""
    outputs: Tensor = head(*z).float()
    if task.regression:
        return outputs
    return outputs.argmax(1) if outputs.ndim > 1 else (outputs > 0).long()
