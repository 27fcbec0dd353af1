"""Tuning on a few examples: many prompts in one batch, and the whole model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import whole
from metapretrain.errors import InputError
from metapretrain.experiments.prompts.data import Pool, allowed_words, word_scores
from metapretrain.experiments.prompts.recipe import Tuning
from metapretrain.graphs import Recorder, rounded_up
from metapretrain.prompts import PromptBatch, PromptedModel
from metapretrain.training.devices import mixed_precision
from metapretrain.training.settings import learning_rate

log = logging.getLogger(__name__)
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW


@dataclass(frozen=True)
class Job:
    """One prompt to tune: its start (L, D), rows of the pool to train and validate on, its words, its data order."""

    name: str
    prompt: Tensor
    train: Tensor
    validation: Tensor
    words: tuple[int, ...]
    seed: int


@dataclass
class Progress:
    """Where one prompt stands; what a checkpoint holds."""

    prompt: Tensor
    best: Tensor
    mean: Tensor
    square: Tensor
    step: int = 0
    since: int = 0
    best_step: int = 0
    accuracy: float = -1.0
    done: bool = False
    diverged: bool = False
    history: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def at(cls, prompt: Tensor) -> Progress:
        """The beginning."""
        zeros = torch.zeros_like(prompt)
        return cls(prompt, prompt, zeros, zeros)


class Stack:
    """Tunes prompts side by side; each ends as if it were tuned alone.

    One that diverges ends there, with a warning, and has the best prompt before that, or its start.

    The rows of all prompts go through the model together, each with its prompt in front, so that a step costs little
    more than that of one prompt. A prompt that has stopped leaves the stack.

    Args:
        model: with `normalise="vocabulary"`.
        pool: rows of all jobs; labels are numbers of words.
        jobs: prompts (L, D) of one length.
        tuning: see :class:`Tuning`.
        normalise: what label words compete with.
        steps: of each prompt; None: `tuning.epochs` of its own rows.
        every: steps between validations; None: an epoch.
        rows_per_pass: rows that go through the model at a time, for training; four times as many for validation.

    Raises:
        InputError: there are no jobs, prompts of several lengths, a name twice, a job without rows or with rows that
            the pool does not have, or a count below 1.
    """

    def __init__(
        self,
        model: PromptedModel,
        pool: Pool,
        jobs: Sequence[Job],
        tuning: Tuning,
        *,
        normalise: str = "vocabulary",
        steps: int | None = None,
        every: int | None = None,
        rows_per_pass: int = 64,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        if not jobs or len({job.prompt.shape for job in jobs}) > 1:
            raise InputError("a stack needs prompts of one shape (L, D), one or more")
        for name, count in (("steps", steps), ("every", every), ("rows_per_pass", rows_per_pass)):
            if count is not None:
                whole(f"{name} of a stack", count, 1)
        _check_jobs(jobs, len(pool.lengths))
        self.model, self.pool, self.tuning, self.normalise = model, pool, tuning, normalise
        self.jobs = sorted(jobs, key=lambda job: float(pool.lengths[job.train].float().mean()))
        self.steps, self.every, self.rows_per_pass = steps, every, rows_per_pass
        self.device, self.precision = device, precision
        self.progress = {job.name: Progress.at(job.prompt.detach().to(device)) for job in self.jobs}
        self.orders: dict[str, tuple[int, Any]] = {}
        self.recorder, self.fixed_shapes = Recorder(self._gradient_of), torch.device(device).type == "cuda"

    def run(self, on_validation: Callable[[Job, Progress], None] | None = None) -> dict[str, Progress]:
        """Tune all prompts; `best` of each is the one to use.

        Args:
            on_validation: called with a job after each of its validations.
        """
        self._validate([job for job in self.jobs if not self.progress[job.name].history], on_validation)
        while running := [job for job in self.jobs if not self.progress[job.name].done]:
            until = min(self._until_validation(job) for job in running)
            self._advance(running, until)
            self._validate([job for job in running if self._until_validation(job, now=True) == 0], on_validation)
        return self.progress

    def total(self, job: Job) -> int:
        """Steps of a job at most."""
        return self.tuning.epochs * self._epoch(job) if self.steps is None else self.steps

    def _epoch(self, job: Job) -> int:
        return -(-len(job.train) // self.tuning.batch_size)

    def _until_validation(self, job: Job, now: bool = False) -> int:
        """Steps to the next validation; with `now`, 0 where one is due."""
        every, step, total = self.every or self._epoch(job), self.progress[job.name].step, self.total(job)
        if now and (step % every == 0 or step == total):
            return 0
        return min(every - step % every, total - step)

    def _advance(self, jobs: list[Job], steps: int) -> None:
        """Take `steps` steps of these jobs, whose states stand side by side meanwhile."""
        states = [self.progress[job.name] for job in jobs]
        prompts, mean, square = (
            torch.stack([getattr(state, name) for state in states]) for name in ("prompt", "mean", "square")
        )
        allowed = allowed_words([job.words for job in jobs], self.device)
        for offset in range(steps):
            at = [state.step + offset for state in states]
            rows, weight = self._rows(jobs, at)
            gradient = self._gradient(prompts, rows, weight, allowed)
            self._adamw(prompts, mean, square, gradient, jobs, at)
        for place, state in enumerate(states):
            state.prompt, state.mean, state.square = prompts[place], mean[place], square[place]
            state.step += steps

    def _rows(self, jobs: list[Job], at: list[int]) -> tuple[Tensor, Tensor]:
        """Rows of the pool and their weights in the mean loss of a job, (R, batch_size) each."""
        size = self.tuning.batch_size
        rows = torch.zeros(len(jobs), size, dtype=torch.int64)
        weight = torch.zeros(len(jobs), size, dtype=torch.float64)
        for place, (job, step) in enumerate(zip(jobs, at, strict=True)):
            epoch, batch = divmod(step, self._epoch(job))
            if self.orders.get(job.name, (-1, None))[0] != epoch:
                order = np.random.default_rng([job.seed, epoch]).permutation(len(job.train))
                self.orders[job.name] = epoch, job.train[torch.from_numpy(order)]
            mine = self.orders[job.name][1][batch * size : (batch + 1) * size]
            rows[place] = mine[torch.arange(size) % len(mine)]  # fill with rows of weight 0
            weight[place, : len(mine)] = 1 / len(mine)
        return rows, weight

    def _gradient(self, prompts: Tensor, rows: Tensor, weight: Tensor, allowed: Tensor) -> Tensor:
        found = torch.empty_like(prompts)
        weight = weight.to(self.device, prompts.dtype, non_blocking=True)
        for part in torch.arange(len(prompts)).split(max(1, self.rows_per_pass // rows.shape[1])):
            if self.fixed_shapes:  # jobs without weight fill it up
                part = torch.cat([part, part[-1:].expand(rounded_up(len(part)) - len(part))])
            first, last, new = int(part[0]), int(part[-1]) + 1, len(part)
            of, weights = part.to(self.device, non_blocking=True), torch.zeros(new, rows.shape[1]).to(weight)
            weights[: last - first] = weight[first:last]
            batch = self.pool.gather(rows[part])
            (gradient,) = self.recorder(prompts[of], weights, allowed[of], *batch.leaves())
            found[first:last] = gradient[: last - first]
        return found

    def _gradient_of(self, prompts: Tensor, weight: Tensor, allowed: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Gradient (R, L, D) of the weighted losses of rows (R, B)."""
        prompts, batch = prompts.detach().requires_grad_(), PromptBatch.of(*leaves)
        assert batch.labels is not None
        with mixed_precision(self.device, self.precision):
            scores = word_scores(self.model, prompts, batch, allowed, self.normalise)
        loss = -(scores.gather(-1, batch.labels[..., None])[..., 0] * weight).sum()
        return torch.autograd.grad(loss, prompts)

    def _adamw(
        self, prompts: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, jobs: list[Job], at: list[int]
    ) -> None:
        """One step of AdamW with a rate and a count of steps for each prompt, in place."""
        t = self.tuning
        rates = [
            learning_rate(step, self.total(job), peak=t.lr, schedule="linear", warmup=t.warmup)
            for job, step in zip(jobs, at, strict=True)
        ]
        table = torch.tensor([rates, *([1 - beta ** (step + 1) for step in at] for beta in BETAS)], dtype=torch.float64)
        lr, first, second = table.to(self.device, prompts.dtype, non_blocking=True)[..., None, None]
        prompts.mul_(1 - lr * t.weight_decay)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        prompts.sub_(lr / first * mean / (square.sqrt() / second.sqrt() + EPSILON))

    def _validate(self, jobs: list[Job], then: Callable[[Job, Progress], None] | None) -> None:
        if not jobs:
            return
        for job, (accuracy, sound, finite) in zip(jobs, self._judged(jobs).tolist(), strict=True):
            state = self.progress[job.name]
            state.history.append((state.step, accuracy))
            if state.step or self.tuning.keep_start:
                state.since += 1
                if accuracy > state.accuracy and sound:
                    state.best, state.accuracy = state.prompt.clone(), accuracy
                    state.best_step, state.since = state.step, 0
            patience = self.tuning.patience
            state.done = state.step >= self.total(job) or (patience is not None and state.since >= patience)
            state.diverged = not sound
            if state.diverged:
                state.done = state.done or not finite  # it stays so
                log.warning(
                    "prompt %s diverged by step %d: that of step %d is kept; lower its lr",
                    job.name,
                    state.step,
                    state.best_step,
                )
            if state.done and state.accuracy < 0:  # none was better than the start
                state.accuracy = state.history[0][1]
            if then is not None:
                then(job, state)

    @torch.no_grad()
    def _judged(self, jobs: list[Job]) -> Tensor:
        """Validation accuracy of each prompt, whether all its scores are finite, and whether it is, (R, 3)."""
        found: dict[str, Tensor] = {}
        most = max(1, 4 * self.rows_per_pass)
        for count in sorted({len(job.validation) for job in jobs}):
            alike = [job for job in jobs if len(job.validation) == count]
            together = max(1, most // count)
            for first in range(0, len(alike), together):
                part = alike[first : first + together]
                prompts = torch.stack([self.progress[job.name].prompt for job in part])
                allowed = allowed_words([job.words for job in part], self.device)
                rows = torch.stack([job.validation for job in part])
                right, known = (
                    torch.cat(parts, 1)
                    for parts in zip(*(self._hits(prompts, some, allowed) for some in rows.split(most, 1)), strict=True)
                )
                finite = prompts.isfinite().flatten(1).all(1)
                judged = torch.stack([right.double().mean(1), known.all(1) & finite, finite], 1)
                found |= dict(zip((job.name for job in part), judged, strict=True))
        return torch.stack([found[job.name] for job in jobs]).cpu()

    def _hits(self, prompts: Tensor, rows: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows (R, N) are right, and which have scores that are numbers."""
        batch = self.pool.gather(rows)
        with mixed_precision(self.device, self.precision):
            scores = word_scores(self.model, prompts, batch, allowed, "vocabulary")
        known = ~scores.isnan().any(-1)  # of a prompt that diverged, nothing is right
        return (scores.argmax(-1) == batch.labels) & known, known


def _check_jobs(jobs: Sequence[Job], rows: int) -> None:
    if len({job.name for job in jobs}) < len(jobs):
        raise InputError(f"jobs of a stack need names of their own, got {', '.join(job.name for job in jobs)}")
    for job in jobs:
        for what, given in (("train", job.train), ("validation", job.validation)):
            if not len(given):
                raise InputError(f"job {job.name} has no {what} rows; give at least one")
            if int(given.min()) < 0 or int(given.max()) >= rows:
                raise InputError(f"{what} of job {job.name} has rows that the pool, of {rows} rows, does not have")


def tune_model(
    model: PromptedModel,
    pool: Pool,
    job: Job,
    tuning: Tuning,
    *,
    normalise: str = "vocabulary",
    device: str = "cpu",
    precision: str = "fp32",
    rows_per_pass: int = 256,
) -> tuple[PromptedModel, Progress]:
    """Tune a copy of the model, without a soft prompt, and return it as it was best; dropout stays off.

    It ends where it diverges, with a warning.

    Args:
        job: its prompt (0, D) is a start without a soft prompt.
    """
    tuned = PromptedModel(
        copy.deepcopy(model.model).float(), model.template, model.verbalizer, max_length=model.max_length
    )
    tuned.model.requires_grad_(True)
    parameters = [p for p in tuned.model.parameters() if p.is_floating_point()]
    optimizer = torch.optim.AdamW(parameters, lr=tuning.lr, weight_decay=tuning.weight_decay)
    allowed, prompt = allowed_words([job.words], device), job.prompt[None].to(device)
    epoch = -(-len(job.train) // tuning.batch_size)
    state, best = Progress.at(job.prompt), copy.deepcopy(tuned.model.state_dict())

    def loss(rows: Tensor) -> Tensor:
        batch = pool.gather(rows[None])
        assert batch.labels is not None
        with mixed_precision(device, precision):
            scores = word_scores(tuned, prompt, batch, allowed, normalise)
        return -scores.gather(-1, batch.labels[..., None]).mean()

    def judge() -> tuple[float, bool]:
        return _accuracy(tuned, prompt, pool, job, allowed, device, precision, rows_per_pass)

    for passes in range(tuning.epochs):
        order = job.train[torch.from_numpy(np.random.default_rng([job.seed, passes]).permutation(len(job.train)))]
        for rows in order.split(tuning.batch_size):
            rate = learning_rate(
                state.step, tuning.epochs * epoch, peak=tuning.lr, schedule="linear", warmup=tuning.warmup
            )
            _set_rate(optimizer, rate)
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
            state.step += 1
        accuracy, sound = judge()
        state.history.append((state.step, accuracy))
        state.since += 1
        if not sound:
            log.warning(
                "the model of %s diverged by step %d: that of step %d is kept; lower its lr",
                job.name,
                state.step,
                state.best_step,
            )
            state.diverged = True
            break
        if accuracy > state.accuracy:
            state.accuracy, state.best_step, state.since = accuracy, state.step, 0
            best = copy.deepcopy(tuned.model.state_dict())
        if tuning.patience is not None and state.since >= tuning.patience:
            break
    tuned.model.load_state_dict(best)
    if state.accuracy < 0:  # there was none but the start
        state.accuracy, _ = judge()
    return tuned, state


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def _accuracy(
    model: PromptedModel, prompt: Tensor, pool: Pool, job: Job, allowed: Tensor, device: str, precision: str, most: int
) -> tuple[float, bool]:
    """Accuracy on the validation rows, and whether all scores and weights are finite."""
    hits, sound = [], all(bool(weight.isfinite().all()) for weight in model.model.parameters())
    for rows in job.validation.split(most):
        batch = pool.gather(rows[None])
        with mixed_precision(device, precision):
            scores = word_scores(model, prompt, batch, allowed, "vocabulary")
        assert batch.labels is not None
        known = ~scores[0].isnan().any(-1)  # of a model that diverged, nothing is right
        hits.append((scores.argmax(-1)[0] == batch.labels[0]) & known)
        sound = sound and bool(known.all())
    return float(torch.cat(hits).double().mean()), sound
