"""Prompt-MAML: a soft prompt from which one inner step leads to a good prompt for each meta task."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import number, whole
from metapretrain.errors import InputError, one_of
from metapretrain.graphs import Recorder, add_gradients, own_gradients
from metapretrain.maml import adapt
from metapretrain.maml.adapt import Options
from metapretrain.maml.inner import differentiable_twice, parse_rates
from metapretrain.prompts.model import PromptedModel
from metapretrain.prompts.soft_prompt import SoftPrompt
from metapretrain.prompts.template import PromptBatch, PromptTemplate, Verbalizer, check_tasks

TINY = 1e-30  # of a squared norm: where the gradient is 0, its norm still has a derivative


def clipped(gradient: Tensor, most: float | None) -> Tensor:
    """Gradients (K, L, D), those of a norm above `most` scaled down to it; None leaves them as they are.

    Example:
        >>> clipped(torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]]), 1.0).squeeze()
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    if most is None:
        return gradient
    norm = (gradient.square().sum((1, 2), keepdim=True) + TINY).sqrt()
    return gradient * (most / norm).clamp(max=1.0)


def clipped_steps(
    loss: Callable[[Tensor], Tensor], stack: Tensor, rate: float | Tensor, *, steps: int, order: int, most: float
) -> Tensor:
    """Prompts (K, L, D) after steps of gradient descent with the clipped gradient of each.

    Args:
        loss: the sum of the tasks' losses under a stack of prompts.
        order: 2 differentiates through gradient and clipping, 1 takes them as constants.
        most: norm of a task's gradient.
    """
    learned = isinstance(rate, Tensor) and rate.requires_grad
    graph = torch.is_grad_enabled() and (stack.requires_grad or learned)
    fast = stack if stack.requires_grad else stack.detach().requires_grad_()
    with torch.enable_grad(), differentiable_twice(order if graph else 1):
        for _ in range(steps):
            (gradient,) = torch.autograd.grad(loss(fast), fast, create_graph=graph and order == 2)
            fast = fast - rate * clipped(gradient, most)
            if not graph:
                fast = fast.detach().requires_grad_()
    return fast if graph else fast.detach()


LEAVES = 4  # tensors of labelled rows


class OuterStep:
    """:meth:`PromptMAML.backward`; on a GPU each shape of rows is recorded at its third call and replayed from then on.

    Starting the kernels of two passes through a language model takes longer than computing them for few rows. Steps,
    order, chunk and rates that are numbers are those of the recording; the prompt and learned rates are read anew.

    Args:
        learner: the prompt and the model; both stay where they are in memory.
        context: called before each step for the context of its precision, such as autocast.

    Raises:
        InputError: no PromptMAML, one without anything to learn, inner rates that come from further computations, which
            a recorded step would miss; when called, rows that :meth:`PromptMAML.backward` refuses.

    Example:
        >>> from transformers import BertForMaskedLM
        >>> from metapretrain.models.scratch import tiny_model, tiny_tokenizer
        >>> from metapretrain.prompts import PromptMAML, PromptTemplate, SoftPrompt, Verbalizer
        >>> tokenizer = tiny_tokenizer()
        >>> bert, words = BertForMaskedLM(tiny_model(len(tokenizer)).config), Verbalizer(["no", "ok"], tokenizer)
        >>> maml = PromptMAML(bert, SoftPrompt.random(5, 32), PromptTemplate("It is <X>."), words)
        >>> data = maml.encode(["a film", "a plot", "a song", "a book"], labels=[0, 1, 1, 0])
        >>> step = OuterStep(maml)
        >>> step(data.take(torch.tensor([[0], [1]])), data.take(torch.tensor([[2], [3]]))).shape
        torch.Size([2])
        >>> maml.prompt.weight.grad.shape
        torch.Size([5, 32])
    """

    def __init__(self, learner: PromptMAML, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        if not hasattr(learner, "prompted"):
            raise InputError(f"an outer step is that of a PromptMAML, not of a {type(learner).__name__}")
        tensors = (learner.prompt.weight, learner.inner_lr)
        learned = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
        if not learned:
            raise InputError("nothing is learned: the prompt takes no gradient, and inner_lr is no tensor that does")
        if not all(tensor.is_leaf for tensor in learned):
            raise InputError("inner_lr comes from further computations; learn a tensor, or use PromptMAML.backward")
        self.learner, self.context, self.learned = learner, context, learned
        self.recorder = Recorder(self._gradients)

    def __call__(self, support: PromptBatch, query: PromptBatch) -> Tensor:
        """Add the gradient of the outer loss to ``.grad``; losses (K,) of support rows (K, m) and query rows (K, q)."""
        check_tasks("support", support)
        check_tasks("query", query)
        losses: Tensor
        losses, gradients = self.recorder(*support.leaves(), *query.leaves())
        add_gradients(self.learned, gradients)
        return losses

    def _gradients(self, *leaves: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        def backward() -> Tensor:
            with self.context():
                return self.learner.backward(PromptBatch.of(*leaves[:LEAVES]), PromptBatch.of(*leaves[LEAVES:]))

        losses, found = own_gradients(backward, self.learned)
        return losses, [
            torch.zeros_like(p) if grad is None else grad for p, grad in zip(self.learned, found, strict=True)
        ]


Pair = tuple[PromptBatch, PromptBatch]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """`steps` taken, the step of the prompt that was kept, its accuracy, and a row of means a validation."""

    steps: int
    best_step: int
    best_accuracy: float
    history: list[dict[str, float]]


def fit(
    learner: PromptMAML,
    steps: Iterable[Pair],
    held_out: Iterable[Pair],
    *,
    lr: float = 0.025,
    weight_decay: float = 0.01,
    rate_lr: float = 1e-3,
    most: int = 20_000,
    every: int = 200,
    patience: int = 6,
    log: Callable[[int, dict[str, torch.Tensor]], None] | None = None,
) -> Fitted:
    """Train the learner's prompt with AdamW and leave it as it was best; section 5 of Huang et al.

    So it does when it is cut short by an error or Ctrl-C.

    Args:
        steps: (support, query) of rows (K, m), one pair an outer step.
        held_out: such pairs of rows that `steps` never holds; accuracy is that of the adapted prompts on the
            query rows, mean over tasks and pairs.
        lr: the outer rate beta.
        weight_decay: of the prompt.
        rate_lr: the outer rate of learned inner rates, which do not decay.
        most: outer steps at most.
        every: outer steps between validations.
        patience: validations without a better accuracy after which training ends.
        log: called with the step and :meth:`PromptMAML.curves`, (K,) each, of the held-out pairs' mean.

    Raises:
        InputError: there are no held-out pairs or no steps, a number is out of range, or the prompt is not finite.
    """
    for name, given in (("steps", steps), ("held_out", held_out)):
        if not isinstance(given, Iterable):
            raise InputError(f"{name} of fit must hold pairs (support, query) of PromptBatch, not {given!r}")
    held_out = list(held_out)
    for name, count in (("most", most), ("every", every), ("patience", patience)):
        whole(f"{name} of fit", count, 1)
    if not held_out:
        raise InputError("fit needs held-out pairs, at least one")
    if not bool(learner.prompt.weight.isfinite().all()):
        raise InputError("the prompt holds NaN or infinity; begin with another one")
    tasks = {_pair("held_out", pair)[0].shape[:1] for pair in held_out}
    if len(tasks) > 1:
        raise InputError(f"held-out pairs must all be of as many tasks, not of {sorted(n for (n,) in tasks)}")
    for name, value in (("lr", lr), ("rate_lr", rate_lr), ("weight_decay", weight_decay)):
        _check_number(name, value, zero=name == "weight_decay")
    update = OuterStep(learner)
    groups: list[dict[str, Any]] = [{"params": [learner.prompt.weight], "lr": lr}]
    if (rates := _learned_rates(learner)) is not None:
        groups.append({"params": [rates], "lr": rate_lr, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, weight_decay=weight_decay)
    state = _Best(learner)
    try:
        state.validate(0, held_out, log)
        step = 0
        for step, pair in enumerate(islice(steps, most), 1):
            support, query = _pair("steps", pair)
            optimizer.zero_grad()
            update(support, query)
            optimizer.step()
            if step % every == 0:
                state.validate(step, held_out, log)
                if state.since >= patience:
                    break
        if not step:
            raise InputError("fit was given no steps")
        if step % every:
            state.validate(step, held_out, log)
    finally:
        state.restore()
    return Fitted(step, state.step, state.accuracy, state.history)


def _pair(what: str, given: Any) -> Pair:
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(part, PromptBatch) for part in given):
        return given[0], given[1]
    raise InputError(f"{what} of fit must hold pairs (support, query) of PromptBatch, not {type(given).__name__}")


def _check_number(name: str, value: float, *, zero: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if not number or (value == 0 and not zero):
        raise InputError(f"{name} of fit must be {'at least' if zero else 'above'} 0 and finite, not {value!r}")


def _learned_rates(learner: PromptMAML) -> torch.Tensor | None:
    rates = learner.inner_lr
    return rates if isinstance(rates, torch.Tensor) and rates.requires_grad else None


class _Best:
    """The best prompt so far with its inner rates, and how many validations ago it was."""

    def __init__(self, learner: PromptMAML) -> None:
        self.learner, self.history = learner, list[dict[str, float]]()
        self.step, self.accuracy, self.since = 0, -1.0, 0
        rates = _learned_rates(learner)
        self.weights = [learner.prompt.weight, *([] if rates is None else [rates])]
        self.best = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def restore(self) -> None:
        for weight, best in zip(self.weights, self.best, strict=True):
            weight.copy_(best)

    def validate(
        self, step: int, held_out: list[Pair], log: Callable[[int, dict[str, torch.Tensor]], None] | None
    ) -> None:
        curves = [self.learner.curves(*pair) for pair in held_out]
        means = {name: torch.stack([one[name] for one in curves]).mean(0) for name in curves[0]}
        if log is not None:
            log(step, means)
        row = {name: float(value.mean()) for name, value in means.items()}
        self.history.append({"step": float(step), **row})
        logger.info("step %d: held-out accuracy %.3f", step, row["accuracy"])
        self.since += 1
        # Scores that are not numbers have a largest one, too: a prompt that diverged may look right.
        if row["accuracy"] > self.accuracy and all(bool(weight.isfinite().all()) for weight in self.weights):
            self.step, self.accuracy, self.since = step, row["accuracy"], 0
            self.best = [weight.detach().clone() for weight in self.weights]


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
        >>> from metapretrain.models.scratch import tiny_model, tiny_tokenizer
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
        if chunk is not None:
            whole("chunk", chunk, 1)
        Options(inner_lr, inner_steps, order, checkpoint=checkpoint)
        if inner_clip is not None:
            number("inner_clip", inner_clip, above=0)
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
