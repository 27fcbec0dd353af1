"""Training of a prompt until the accuracy of meta tasks on held-out rows stops growing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from metapretrain.errors import InputError
from metapretrain.prompts.batch import PromptBatch
from metapretrain.prompts.outer_step import OuterStep

if TYPE_CHECKING:
    from metapretrain.prompts.learner import PromptMAML

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
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} of fit must be a whole number of at least 1, not {count!r}")
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
