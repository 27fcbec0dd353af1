"""Prompt-MAML: a soft prompt from which one inner step leads to a good prompt for each meta task."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError, one_of
from metapretrain.maml import adapt
from metapretrain.maml.problem import Options
from metapretrain.maml.rates import parse_rates
from metapretrain.prompts.batch import PromptBatch, check_tasks
from metapretrain.prompts.clipping import clipped, clipped_steps
from metapretrain.prompts.fitting import Fitted, Pair, fit
from metapretrain.prompts.prompted import PromptedModel
from metapretrain.prompts.soft_prompt import SoftPrompt
from metapretrain.prompts.template import PromptTemplate
from metapretrain.prompts.verbalizer import Verbalizer


class PromptMAML(nn.Module):
    """Algorithm 1 of Huang et al.: P' = P - alpha grad L_support(P); the outer loss is that of P' on query rows.

    Tasks differ only in their prompt: all rows of all tasks go through the model at once, each with its task's
    prompt in front, and the gradient by the (K, L, D) stack of prompts is the K inner steps.

    Args:
        model: a language model of transformers; it is frozen.
        prompt: the initialisation P, a :class:`SoftPrompt`; on the model's device.
        template, verbalizer: see there.
        inner_lr: alpha: a number above 0, or a tensor that (L, D) broadcasts with, which can be learned.
        inner_steps: 0 is plain prompt tuning on the query rows.
        order: 2, or 1 to take the inner gradients as constants.
        inner_clip: norm to which each task's inner gradient is scaled down; None: as it is.
        chunk: tasks computed at a time; None: all.
        reduction: the outer loss is the "sum" over tasks (equation 6) or their "mean".
        checkpoint: compute inner steps again in the backward pass, for less memory.
        options: those of :class:`PromptedModel`: max_length, normalise.

    Raises:
        InputError: a value is not allowed, `checkpoint` comes with `inner_clip`, or the prompt does not fit the model.

    Example:
        >>> from transformers import BertForMaskedLM
        >>> from metapretrain.models.tiny_text import tiny_model, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> bert, words = BertForMaskedLM(tiny_model(len(tokenizer)).config), Verbalizer(["no", "ok"], tokenizer)
        >>> maml = PromptMAML(bert, SoftPrompt.random(5, 32), PromptTemplate("It is <X>."), words)
        >>> data = maml.encode(["a film", "a plot", "a song", "a book"], labels=[0, 1, 1, 0])
        >>> support, query = data.take(torch.tensor([[0], [1]])), data.take(torch.tensor([[2], [3]]))
        >>> maml.losses(support, query).shape  # of each of K = 2 tasks
        torch.Size([2])
    """

    def __init__(
        self,
        model: Any,
        prompt: SoftPrompt,
        template: PromptTemplate,
        verbalizer: Verbalizer,
        *,
        inner_lr: float | Tensor = 0.08,
        inner_steps: int = 1,
        order: int = 2,
        inner_clip: float | None = None,
        chunk: int | None = None,
        reduction: str = "sum",
        checkpoint: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.prompted = PromptedModel(model, template, verbalizer, **options)
        if not isinstance(prompt, SoftPrompt):
            raise InputError(f"prompt must be a SoftPrompt, such as SoftPrompt(tensor), not a {type(prompt).__name__}")
        if prompt.features != self.prompted.features:
            raise InputError(
                f"the prompt has {prompt.features} features, but the model's embeddings have {self.prompted.features}"
            )
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise InputError(f"chunk must be an integer of at least 1, or None, not {chunk!r}")
        Options(inner_lr, inner_steps, order, checkpoint=checkpoint)
        number = isinstance(inner_clip, int | float) and not isinstance(inner_clip, bool)
        if inner_clip is not None and not (number and 0 < inner_clip < math.inf):
            raise InputError(f"inner_clip is a norm above 0, or None, not {inner_clip!r}")
        if inner_clip is not None and checkpoint:
            raise InputError("checkpoint takes no inner_clip; leave one of them out")
        parse_rates({"prompt": inner_lr}, {"prompt": prompt.weight.shape}, inner_steps)
        self.prompt, self.chunk, self.inner_clip = prompt, chunk, inner_clip
        self.inner_lr: float | Tensor = inner_lr
        self.inner_steps, self.order, self.checkpoint = inner_steps, order, checkpoint
        self.reduction = one_of("reduction", reduction, ["mean", "sum"])

    def encode(self, *texts: Any, **labels: Any) -> PromptBatch:
        """Tokens and labels of rows: :meth:`PromptedModel.encode`."""
        return self.prompted.encode(*texts, **labels)

    def adapted(self, support: PromptBatch) -> Tensor:
        """Each task's prompt after the inner steps on its support rows (K, m), (K, L, D)."""
        check_tasks("support", support)
        stack = self.prompt().expand(support.shape[0], -1, -1)
        if torch.is_grad_enabled():
            return self._adapted(stack, support)
        with torch.enable_grad():  # the inner steps need gradients; the caller wants no graph of them
            return self._adapted(stack.detach(), support).detach()

    def _adapted(self, stack: Tensor, support: PromptBatch) -> Tensor:
        def summed(params: dict[str, Tensor], rows: PromptBatch) -> Tensor:
            # A task's mean loss depends on its own prompt alone: the sum's gradient holds each task's.
            return self.prompted.losses(params["prompt"], rows).mean(1).sum()

        if self.inner_clip is not None:

            def loss(fast: Tensor) -> Tensor:
                return summed({"prompt": fast}, support)

            sizes = {"steps": self.inner_steps, "order": self.order}
            return clipped_steps(loss, stack, self.inner_lr, most=self.inner_clip, **sizes)
        options: dict[str, Any] = {"steps": self.inner_steps, "order": self.order, "checkpoint": self.checkpoint}
        rates = {"prompt": self.inner_lr}
        found: Tensor = adapt(summed, {"prompt": stack}, support, lr=rates, engine="loop", **options)["prompt"]
        return found

    def losses(self, support: PromptBatch, query: PromptBatch) -> Tensor:
        """Mean loss of each task's query rows under its adapted prompt, (K,).

        Args:
            support, query: rows (K, m) and (K, q) with labels; query rows must be others than support rows.

        Raises:
            InputError: rows without labels or of another shape.
        """
        parts = [self._of_chunk(*pair) for pair in self._chunks(support, query)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def loss(self, support: PromptBatch, query: PromptBatch) -> Tensor:
        """The outer loss, a scalar: sum or mean of :meth:`losses`."""
        losses = self.losses(support, query)
        return losses.sum() if self.reduction == "sum" else losses.mean()

    def backward(self, support: PromptBatch, query: PromptBatch) -> Tensor:
        """Add the gradient of :meth:`loss` to ``.grad``, chunk by chunk with the memory of one; losses (K,)."""
        scale = 1.0 if self.reduction == "sum" else 1.0 / support.shape[0]
        found = []
        for pair in self._chunks(support, query):
            losses = self._of_chunk(*pair)
            (losses.sum() * scale).backward()
            found.append(losses.detach())
        return torch.cat(found)

    def curves(self, support: PromptBatch, query: PromptBatch) -> dict[str, Tensor]:
        """What to watch, each (K,): support loss, query loss before and after, inner gradient norm, query accuracy."""
        prompt = self.prompt().detach()
        found: list[dict[str, Tensor]] = []
        for part, other in self._chunks(support, query):
            stack = prompt.expand(part.shape[0], -1, -1).clone().requires_grad_()
            with torch.enable_grad():
                before = self.prompted.losses(stack, part).mean(1)
                (gradient,) = torch.autograd.grad(before.sum(), stack)
            if self.inner_steps == 1:  # the gradient above is that of the step
                fast = (stack - self.inner_lr * clipped(gradient, self.inner_clip)).detach()
            else:
                fast = self._adapted(stack.detach(), part).detach()
            assert other.labels is not None
            with torch.no_grad():
                after = self.prompted(fast, other)
                known = ~after.isnan().any(-1)  # of a prompt that diverged, nothing is right
                found.append(
                    {
                        "support_loss": before.detach(),
                        "query_loss_before": self.prompted.losses(prompt, other).mean(1),
                        "query_loss_after": -after.gather(-1, other.labels[..., None])[..., 0].mean(1),
                        "inner_gradient_norm": gradient.flatten(1).norm(dim=1),
                        "accuracy": (known & (after.argmax(-1) == other.labels)).float().mean(1),
                    }
                )
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def fit(self, steps: Iterable[Pair], held_out: Iterable[Pair], **options: Any) -> Fitted:
        """Train the prompt on (support, query) pairs until accuracy on held-out pairs stops growing: :func:`fit`."""
        return fit(self, steps, held_out, **options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the prompt as an adapter that ``PeftModel.from_pretrained(base, folder)`` loads."""
        self.prompted.save(folder, self.prompt())

    def _of_chunk(self, support: PromptBatch, query: PromptBatch) -> Tensor:
        return self.prompted.losses(self.adapted(support), query).mean(1)

    def _chunks(self, support: PromptBatch, query: PromptBatch) -> list[Pair]:
        check_tasks("support", support)
        check_tasks("query", query)
        tasks = support.shape[0]
        if query.shape[0] != tasks:
            raise InputError(f"support has {tasks} tasks and query {query.shape[0]}; give the same tasks")
        if self.chunk is None or self.chunk >= tasks:
            return [(support, query)]
        rows = torch.arange(tasks, device=support.answer.device).split(self.chunk)
        return [(support.take(part), query.take(part)) for part in rows]
