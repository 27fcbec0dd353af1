"""Prompt-MAML: a soft prompt from which one inner step leads to a good prompt for each meta task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import number, whole
from metapretrain.distributed import mean_over_ranks
from metapretrain.draws import generator
from metapretrain.errors import InputError, one_of
from metapretrain.graphs import Recorder, add_gradients, own_gradients
from metapretrain.maml import adapt
from metapretrain.maml.adapt import Options
from metapretrain.maml.inner import differentiable_twice, parse_rates
from metapretrain.prompts.model import PromptedModel
from metapretrain.prompts.soft_prompt import SoftPrompt
from metapretrain.prompts.template import PromptBatch, PromptTemplate, Verbalizer, check_batch, check_tasks
from metapretrain.training import KeepBest, RunFolder, TrainReport, TrainSettings, train
from metapretrain.training.engine import with_gradients

TINY = 1e-30  # of a squared norm: where the gradient is 0, its norm still has a derivative


def clipped(gradient: Tensor, most: float | None) -> Tensor:
    """Gradients (K, L, D), those of a norm above `most` scaled down to it; None leaves them as they are."""
    if most is None:
        return gradient
    norm = (gradient.square().sum((1, 2), keepdim=True) + TINY).sqrt()
    return gradient * (most / norm).clamp(max=1.0)


def clipped_steps(
    loss: Callable[[Tensor], Tensor], stack: Tensor, rate: float | Tensor, *, steps: int, order: int, most: float | None
) -> Tensor:
    """Prompts (K, L, D) after steps of gradient descent by the sum of losses, each gradient clipped to `most`."""
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
    """An outer step: `backward` of :class:`PromptMAML`, on a GPU recorded at the third call of each shape of rows.

    All settings that are numbers stay as recorded; the prompt and learned rates are read anew. `context` is called
    before each step for that of its precision, such as autocast.
    Raises InputError: nothing to learn; inner rates that come from further computations; rows that `backward` refuses.
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
        """Add the gradient of the outer loss to ``.grad``; return the losses (K,) of query rows (K, q)."""
        losses, gradients = self.gradients(support, query)
        add_gradients(self.learned, gradients)
        return losses

    def gradients(self, support: PromptBatch, query: PromptBatch) -> tuple[Tensor, list[Tensor | None]]:
        """Losses (K,), and the gradient of the outer loss by each tensor in `learned`; ``.grad`` stays as it is."""
        check_tasks("support", support)
        check_tasks("query", query)
        found: tuple[Tensor, list[Tensor | None]] = self.recorder(*support.leaves(), *query.leaves())
        return found

    def _gradients(self, *leaves: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        with own_gradients(self.learned) as found, self.context():
            losses = self.learner.backward(*_pair_of(leaves))
        return losses, found


Pair = tuple[PromptBatch, PromptBatch]
CURVES = ("support_loss", "query_loss_before", "query_loss_after", "inner_gradient_norm", "accuracy")
QUERY = "query"  # the only task of the training loop
Context = Callable[[], AbstractContextManager[Any]]
Log = Callable[[int, dict[str, Tensor]], Mapping[str, float] | None]


def _pair_of(leaves: Sequence[Tensor]) -> Pair:
    return PromptBatch.of(*leaves[:LEAVES]), PromptBatch.of(*leaves[LEAVES:])


class _Step(nn.Module):
    """An outer step for the training loop. The frozen language model is no part of it."""

    reduces_gradients = True

    def __init__(self, learner: PromptMAML, context: Context, lr: float, weight_decay: float, rate_lr: float) -> None:
        super().__init__()
        self.outer, self.prompt = OuterStep(learner, context), learner.prompt
        self.rates: nn.Parameter | None = None
        rates = learner.inner_lr
        if isinstance(rates, Tensor) and rates.requires_grad:  # a parameter in the same memory
            self.rates = rates if isinstance(rates, nn.Parameter) else nn.Parameter(rates.detach())
        groups = [(self.prompt.weight, lr, weight_decay), (self.rates, rate_lr, 0.0)]
        self.groups: list[dict[str, Any]] = [
            {"params": [p], "lr": rate, "weight_decay": decay}
            for p, rate, decay in groups
            if p is not None and p.requires_grad
        ]

    def parameter_groups(self) -> list[dict[str, Any]]:
        return self.groups

    def forward(self, batches: Mapping[str, Pair]) -> dict[str, Tensor]:
        losses, gradients = self.outer.gradients(*batches[QUERY])
        loss, *means = mean_over_ranks([losses.mean(), *(gradient for gradient in gradients if gradient is not None)])
        used = [group["params"][0] for group, grad in zip(self.groups, gradients, strict=True) if grad is not None]
        return {QUERY: with_gradients(loss, means, used)}


class _Pairs:
    """The pairs of `fit` as a stream; where they have a state, a resume goes to it, and else passes over pairs."""

    may_end = True

    def __init__(self, steps: Iterable[Any]) -> None:
        self.steps, self.step = steps, 0

    def __iter__(self) -> Iterator[dict[str, Pair]]:
        has_state = hasattr(self.steps, "load_state_dict")
        for pair in islice(self.steps, 0 if has_state else self.step, None):
            self.step += 1
            yield {QUERY: _pair("steps", pair)}

    def follow(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
        if hasattr(self.steps, "follow"):
            self.steps.follow(optimizer, clip)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "steps": self.steps.state_dict() if hasattr(self.steps, "state_dict") else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        if hasattr(self.steps, "load_state_dict"):
            self.steps.load_state_dict(state["steps"])


def _pair(what: str, given: Any) -> Pair:
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(part, PromptBatch) for part in given):
        return given[0], given[1]
    raise InputError(f"{what} of fit must hold pairs (support, query) of PromptBatch, not {type(given).__name__}")


class PromptMAML(nn.Module):
    """Algorithm 1 of Huang et al.: P' = P - alpha grad L_support(P); the outer loss is that of P' on query rows.

    All rows of all K tasks go through the model at once, each behind its task's prompt of a (K, L, D) stack.

    Args:
        model, prompt: a language model of transformers, which is frozen; the initialisation P, on its device.
        inner_lr: alpha: a number above 0, or a tensor that (L, D) broadcasts with, which can be learned.
        inner_steps: 0 is plain prompt tuning on the query rows.
        order: 2, or 1 to take the inner gradients as constants.
        inner_clip: norm to which each task's inner gradient is scaled down; None: as it is.
        chunk: tasks computed at a time; None: all.
        reduction: the outer loss is the "sum" over tasks (equation 6) or their "mean".
        checkpoint: compute inner steps again in the backward pass, for less memory.
        options: `max_length`, `normalise` and `compile` of :class:`PromptedModel`.

    Raises InputError: a value that is not allowed, `checkpoint` with `inner_clip`, or a prompt of another model.

    Example:
        >>> from metapretrain import PromptTemplate, SoftPrompt, Verbalizer
        >>> from metapretrain.models.language_models import load_language_model
        >>> model, tokenizer = load_language_model("tiny-masked")
        >>> words = Verbalizer(["bad", "good"], tokenizer)
        >>> maml = PromptMAML(model, SoftPrompt.random(5, 32), PromptTemplate("It is <X>."), words)
        >>> data = maml.encode(["a film", "a plot", "a song", "a book"], labels=[0, 1, 1, 0])
        >>> support, query = data.take(torch.tensor([[0], [1]])), data.take(torch.tensor([[2], [3]]))
        >>> maml.losses(support, query).shape, OuterStep(maml)(support, query).shape  # of each of K = 2 tasks
        (torch.Size([2]), torch.Size([2]))
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
        if prompt.features != (own := self.prompted.features):
            raise InputError(f"the prompt has {prompt.features} features, but the model's embeddings have {own}")
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

        options: dict[str, Any] = {"steps": self.inner_steps, "order": self.order}
        if self.inner_clip is not None:
            options["most"] = self.inner_clip
            return clipped_steps(lambda fast: summed({"prompt": fast}, support), stack, self.inner_lr, **options)
        options |= {"lr": {"prompt": self.inner_lr}, "engine": "loop", "checkpoint": self.checkpoint}
        found: Tensor = adapt(summed, {"prompt": stack}, support, **options)["prompt"]
        return found

    def losses(self, support: PromptBatch, query: PromptBatch) -> Tensor:
        """Mean loss (K,) of each task's query rows (K, q) under its prompt adapted to other, support rows (K, m)."""
        return torch.cat([self._of_chunk(*pair) for pair in self._chunks(support, query)])

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
        found: list[tuple[Tensor, ...]] = []
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
                of_query = self.prompted.losses(prompt, other).mean(1)
                adapted = -after.gather(-1, other.labels[..., None])[..., 0].mean(1)
                right = (known & (after.argmax(-1) == other.labels)).float().mean(1)
            found.append((before.detach(), of_query, adapted, gradient.flatten(1).norm(dim=1), right))
        return {name: torch.cat(parts) for name, parts in zip(CURVES, zip(*found, strict=True), strict=True)}

    def fit(
        self,
        steps: Iterable[Pair],
        held_out: Iterable[Pair],
        *,
        lr: float = 0.025,
        weight_decay: float = 0.01,
        rate_lr: float = 1e-3,
        most: int = 20_000,
        every: int = 200,
        patience: int | None = 6,
        log: Log | None = None,
        run: RunFolder | None = None,
        context: Context = nullcontext,
    ) -> TrainReport:
        """Train the prompt with AdamW and leave it as it was best, also when cut short; section 5 of Huang et al.

        Args:
            steps, held_out: pairs (support, query) of rows (K, m): one per outer step; those to validate on, by the
                accuracy of adapted prompts on query rows.
            lr, weight_decay: of the prompt; `rate_lr`: the outer rate of learned inner rates.
            most: outer steps at most; `every`: those between validations.
            patience: validations without a better accuracy after which training ends; None: it does not.
            log: called with the step and the held-out mean of :meth:`curves`, (K,) each; what it returns is kept too.
            run: logs, and where a run that was cut short goes on from: `steps` are those of the whole run, passed
                over as far as taken unless they have `state_dict` and `load_state_dict`.
            context: called before each pass for the context of its precision, such as autocast.

        Returns the report of :func:`metapretrain.training.train`; `best` tells step, accuracy and history.
        Raises InputError: no held-out pairs or no steps, a number out of range, or a prompt that is not finite.
        """
        for name, given in (("steps", steps), ("held_out", held_out)):
            if not isinstance(given, Iterable):
                raise InputError(f"{name} of fit must hold pairs (support, query) of PromptBatch, not {given!r}")
        pairs = [_pair("held_out", pair) for pair in held_out]
        for name, count in (("most", most), ("every", every), ("patience", 1 if patience is None else patience)):
            whole(f"{name} of fit", count, 1)
        for name, value in (("lr", lr), ("rate_lr", rate_lr)):
            number(f"{name} of fit", value, above=0, below=1e30)
        number("weight_decay of fit", weight_decay, least=0)
        if not pairs:
            raise InputError("fit needs held-out pairs, at least one")
        if not bool(self.prompt.weight.isfinite().all()):
            raise InputError("the prompt holds NaN or infinity; begin with another one")
        if len(tasks := {len(support) for support, _ in pairs}) > 1:
            raise InputError(f"held-out pairs must all be of as many tasks, not of {sorted(tasks)}")

        def curves(*leaves: Tensor) -> list[Tensor]:
            with context():
                found = self.curves(*_pair_of(leaves))
            return [found[name] for name in CURVES]

        recorder = Recorder(curves)

        def evaluate(step: int) -> dict[str, float]:
            found = [recorder(*support.leaves(), *query.leaves()) for support, query in pairs]
            means = {name: torch.stack(of).mean(0) for name, of in zip(CURVES, zip(*found, strict=True), strict=True)}
            more = None if log is None else log(step, means)
            by_task = {f"accuracy_task_{k}": float(value) for k, value in enumerate(means["accuracy"])}
            return {name: float(value.mean()) for name, value in means.items()} | by_task | dict(more or {})

        device = self.prompt.weight.device
        often: dict[str, Any] = dict.fromkeys(("log_every", "checkpoint_every", "evaluate_every"), every)
        where: dict[str, Any] = {"device": str(device) if device.type == "cuda" else device.type}
        where["cuda_graph"] = False  # an outer step records itself
        settings = TrainSettings(most, lr, optimizer="adamw", schedule="constant", warmup=0.0, **where, **often)
        step = _Step(self, context, lr, weight_decay, rate_lr)
        best = KeepBest(patience=patience, start=True, forgiving=True, name="the prompt")
        report = train(step, _Pairs(steps), settings, run=run, evaluate=evaluate, keep_best=best, title="prompt")
        if not report.steps:
            raise InputError("fit was given no steps")
        return report

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


def tune(
    model: PromptedModel,
    prompt: SoftPrompt,
    rows: PromptBatch,
    held_out: PromptBatch | None = None,
    *,
    lr: float = 3e-3,
    batch_size: int = 4,
    epochs: int = 20,
    patience: int | None = 5,
    seed: int = 0,
    run: RunFolder | None = None,
) -> TrainReport:
    """Train a prompt on labelled rows with AdamW (Lester et al., 2021), as :meth:`PromptMAML.fit` without inner steps.

    `rows` are as `model.encode(texts, labels=...)` gives them; `held_out` rows (None: `rows`) judge the prompt after
    each epoch: it ends as it was best, after `patience` epochs without a better accuracy if that is a number.
    """
    batch_size, epochs = whole("batch_size", batch_size, 1), whole("epochs", epochs, 1)
    judges = rows if held_out is None else held_out
    for name, batch in (("rows", rows), ("held_out", judges)):
        check_batch(name, batch)
        if len(batch.shape) != 1 or batch.labels is None:
            raise InputError(f"{name} of tune must be labelled rows (B,): model.encode(texts, labels=...)")
    rows, judges = rows.to(prompt.weight.device), judges.to(prompt.weight.device)
    options: dict[str, Any] = {"max_length": model.max_length, "normalise": model.normalise}
    learner = PromptMAML(model.model, prompt, model.template, model.verbalizer, inner_steps=0, **options)
    parts = torch.arange(len(judges)).tensor_split(-(-len(judges) // 64))
    orders = (torch.randperm(len(rows), generator=generator(seed, "tune", epoch)) for epoch in range(epochs))
    batches = (rows.take(part[None]) for order in orders for part in order.split(batch_size))
    every = -(-len(rows) // batch_size)
    pairs = [(part, part) for part in (judges.take(own[None]) for own in parts)]
    counts: dict[str, Any] = {"most": epochs * every, "every": every, "patience": patience}
    return learner.fit(((batch, batch) for batch in batches), pairs, lr=lr, **counts, run=run)
