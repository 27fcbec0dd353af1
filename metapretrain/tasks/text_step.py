"""The step of several text tasks: one pass through the encoder for all of them, or gradient surgery between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.protonet import ProtoLoss
from metapretrain.tasks.objectives import WeightedLosses
from metapretrain.tasks.surgery import cosines, dot_products, pcgrad, task_gradients
from metapretrain.tasks.text_objectives import Encoded, TextObjective, TextRows


class TextStep(WeightedLosses[TextObjective]):
    """The losses of one update: an encoder and a task's objective each.

    The rows of all tasks go through the encoder together where their batches have one width.

    Args:
        model: encoder, {"input_ids", "attention_mask", ...} (B, L) to features (B, D).
        objectives: by the task's name.
        weights: of the losses, 1 where not named.
        surgery: PCGrad on the encoder's parameters (Yu et al., 2020).
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Mapping[str, TextObjective],
        weights: Mapping[str, float] | None = None,
        surgery: bool = False,
    ) -> None:
        super().__init__(model, objectives, weights)
        self.surgery = surgery

    @property
    def texts(self) -> dict[str, TextRows]:
        """Tokens and labels of each task's training rows."""
        return {name: self.objective(name).texts for name in self.objectives}

    def forward(self, batches: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return `{name: weighted loss}` for `{name: {"rows": (B,), "width": (L, 0)}}`."""
        if not self.surgery:
            return self.losses(batches, self.encode(batches))
        # Each task by itself: the backward pass of a task then has its own rows only.
        losses: dict[str, Tensor] = {}
        for name, batch in batches.items():
            losses |= self.losses({name: batch}, self.encode({name: batch}))
        return pcgrad(losses, list(self.model.parameters()))

    def losses(self, batches: Mapping[str, Any], z: Mapping[str, Encoded]) -> dict[str, Tensor]:
        """Return `{name: weighted loss}` of embedded batches."""
        return {
            name: self.weights.get(name, 1.0) * self.objective(name).loss(z[name], batch["rows"])
            for name, batch in batches.items()
        }

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
        """Return the cosine between the gradients of each two tasks' losses, over the encoder's parameters.

        In evaluation mode: dropout takes no part. Every rank looks at the whole batches. Waits for the device.

        Returns:
            {"gradient_cosine_sst_para": ...}, for each pair of tasks; below 0 they conflict.
        """
        mode, counters = self.training, [(buffer, buffer.clone()) for buffer in self.objectives.buffers()]
        gathering = [part for part in self.objectives.modules() if isinstance(part, ProtoLoss) and part.gather]
        self.eval()
        for proto in gathering:
            proto.gather = False
        names, parameters = list(batches), [p for p in self.model.parameters() if p.requires_grad]
        gradients = []
        with torch.compiler.set_stance("force_eager"):  # compiled code goes back once only
            for name in names:  # one graph at a time
                loss = self.losses({name: batches[name]}, self.encode({name: batches[name]}))[name]
                gradients += task_gradients([loss], parameters)
        found = cosines(dot_products(gradients)).tolist()
        self.train(mode)
        for proto in gathering:
            proto.gather = True
        for buffer, value in counters:  # calls in which nothing could be scored are counted: these are none of training
            buffer.copy_(value)
        return {
            f"gradient_cosine_{a}_{b}": found[i][j]
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i < j
        }


def _stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One batch of several; token types are 0 where only some have them."""
    keys = dict.fromkeys(key for part in parts for key in part)
    blank = torch.zeros_like
    return {key: torch.cat([part.get(key, blank(part["input_ids"])) for part in parts]) for key in keys}
