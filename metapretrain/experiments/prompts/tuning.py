"""Tuning on a few examples: many prompts in one batch, and the whole model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import whole
from metapretrain.draws import epoch_order
from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError
from metapretrain.experiments.prompts.data import Pool, allowed_words, word_scores
from metapretrain.experiments.prompts.recipe import Tuning
from metapretrain.graphs import Recorder, rounded_up
from metapretrain.nests import map_tensors
from metapretrain.prompts import PromptBatch, PromptedModel
from metapretrain.training import KeepBest, TrainSettings, learning_rate, train
from metapretrain.training.environment import mixed_precision
from metapretrain.training.logs import ProgressLine


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
    """Where the tuning of a prompt (L, D), or of the model, stands: steps taken, and its validations."""

    prompt: Tensor
    validated: KeepBest = field(default_factory=KeepBest)
    step: int = 0
    done: bool = False

    @property
    def best(self) -> Tensor:
        """The prompt to use."""
        found: Tensor = self.validated.weights.get("prompt", self.prompt)
        return found

    @property
    def accuracy(self) -> float:
        """That of the best prompt; of the first one, where none was better."""
        value = self.validated.value
        return value if value >= 0 or not self.history else self.history[0][1]

    @property
    def history(self) -> list[tuple[int, float]]:
        """Step and accuracy of each validation; a model that gives no numbers has nothing right."""
        found = [(int(row["step"]), row["accuracy"]) for row in self.validated.history]
        return [(step, 0.0 if math.isnan(value) else value) for step, value in found]


class Stack:
    """Tunes prompts side by side; each ends as if it were tuned alone.

    One that diverges stops with a warning and its best prompt before that, or its start.

    Args:
        model: with `normalise="vocabulary"`; pool: rows of all jobs; labels are numbers of words.
        jobs: prompts (L, D) of one length; normalise: what label words compete with.
        steps: of each prompt; None: `tuning.epochs` of its own rows; every: steps between validations; None: an epoch.
        rows_per_pass: rows that go through the model at a time, for training; four times as many for validation.

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
        self.progress = {job.name: self._begun(job) for job in self.jobs}
        self.orders = {job.name: _order(job, tuning.batch_size) for job in self.jobs}
        self.fixed_shapes = torch.device(device).type == "cuda"
        self.recorder = Recorder(self._gradient_of)
        groups: list[dict[str, Any]] = [{"params": [self.progress[job.name].prompt]} for job in self.jobs]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=tuning.weight_decay, fused=self.fixed_shapes)

    def _begun(self, job: Job) -> Progress:
        prompt = nn.Parameter(job.prompt.detach().to(self.device, copy=True))
        patience, start = self.tuning.patience, self.tuning.keep_start
        best = KeepBest(patience=patience, start=start, forgiving=True, name=f"prompt {job.name}")
        best.begin({"prompt": prompt})
        return Progress(prompt, best)

    def state_of(self, name: str) -> dict[str, Any]:
        """Return what a checkpoint of one job holds."""
        state = self.progress[name]
        found = {"prompt": state.prompt.detach(), "optimizer": dict(self.optimizer.state[state.prompt])}
        return {**found, "validated": state.validated.state_dict(), "step": state.step, "done": state.done}

    @torch.no_grad()
    def load_state_of(self, name: str, given: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_of`."""
        state = self.progress[name]
        state.prompt.copy_(given["prompt"])
        self.optimizer.state[state.prompt] = map_tensors(lambda value: value.to(self.device), given["optimizer"])
        state.validated.load_state_dict(map_tensors(lambda value: value.to(self.device), given["validated"]))
        state.step, state.done = given["step"], given["done"]

    def run(self, on_validation: Callable[[Job, Progress], None] | None = None) -> dict[str, Progress]:
        """Tune all prompts; use `best` of each. `on_validation` is called after each validation of a job."""
        self._validate([job for job in self.jobs if not self.progress[job.name].history], on_validation)
        done = sum(state.step for state in self.progress.values())
        line = ProgressLine(f"{len(self.jobs)} prompts", sum(map(self.total, self.jobs)), done)
        while running := [job for job in self.jobs if not self.progress[job.name].done]:
            until = min(self._until_validation(job) for job in running)
            self._advance(running, until)
            line.at(sum(state.step for state in self.progress.values()))
            self._validate([job for job in running if self._until_validation(job, now=True) == 0], on_validation)
        return self.progress

    def total(self, job: Job) -> int:
        """Steps of a job at most."""
        return self.tuning.epochs * len(self.orders[job.name]) if self.steps is None else self.steps

    def _until_validation(self, job: Job, now: bool = False) -> int:
        """Steps to the next validation; with `now`, 0 where one is due."""
        every, step, total = self.every or len(self.orders[job.name]), self.progress[job.name].step, self.total(job)
        return 0 if now and (step % every == 0 or step == total) else min(every - step % every, total - step)

    def _advance(self, jobs: list[Job], steps: int) -> None:
        """Take `steps` steps of these jobs."""
        states = [self.progress[job.name] for job in jobs]
        allowed = allowed_words([job.words for job in jobs], len(self.model.verbalizer), self.device)
        for _ in range(steps):
            prompts = torch.stack([state.prompt.detach() for state in states])
            rows, weight = self._rows(jobs, [state.step for state in states])
            self.optimizer.zero_grad()  # those that have stopped get no gradient, and stay
            found = torch.empty_like(prompts)
            for place, inputs in self._parts(prompts, rows, weight, allowed):
                (gradient,) = (self.recorder if self.fixed_shapes else self._gradient_of)(*inputs)
                found[place] = gradient[: place.stop - place.start]
            for state, gradient in zip(states, found, strict=True):
                state.prompt.grad = gradient
            for group, job in zip(self.optimizer.param_groups, self.jobs, strict=True):
                group["lr"] = self._rate(job)
            self.optimizer.step()
            for state in states:
                state.step += 1

    def _rate(self, job: Job) -> float:
        t, step, total = self.tuning, self.progress[job.name].step, self.total(job)
        return learning_rate(step, total, peak=t.lr, schedule="linear", warmup=t.warmup)

    def _rows(self, jobs: list[Job], at: list[int]) -> tuple[Tensor, Tensor]:
        """Rows of the pool and their weights in the mean loss of a job, (R, batch_size) each."""
        size = self.tuning.batch_size
        rows = torch.zeros(len(jobs), size, dtype=torch.int64)
        weight = torch.zeros(len(jobs), size, dtype=torch.float64)
        for place, (job, step) in enumerate(zip(jobs, at, strict=True)):
            mine = self.orders[job.name].batch(step)
            rows[place] = mine[torch.arange(size) % len(mine)]  # fill with rows of weight 0
            weight[place, : len(mine)] = 1 / len(mine)
        return rows, weight

    def _parts(
        self, prompts: Tensor, rows: Tensor, weight: Tensor, allowed: Tensor
    ) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """The jobs of each pass through the model, and what :meth:`_gradient_of` takes for them."""
        weight = weight.to(self.device, prompts.dtype, non_blocking=True)
        for part in torch.arange(len(prompts)).split(max(1, self.rows_per_pass // rows.shape[1])):
            if self.fixed_shapes:  # jobs without weight fill it up
                part = torch.cat([part, part[-1:].expand(rounded_up(len(part)) - len(part))])
            place, new = slice(int(part[0]), int(part[-1]) + 1), len(part)
            of, weights = part.to(self.device, non_blocking=True), torch.zeros(new, rows.shape[1]).to(weight)
            weights[: place.stop - place.start] = weight[place]
            yield place, (prompts[of], weights, allowed[of], *self.pool.gather(rows[part]).leaves())

    def _gradient_of(self, prompts: Tensor, weight: Tensor, allowed: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Gradient (R, L, D) of the weighted losses of rows (R, B)."""
        prompts, batch = prompts.detach().requires_grad_(), PromptBatch.of(*leaves)
        assert batch.labels is not None
        with mixed_precision(self.device, self.precision):
            scores = word_scores(self.model, prompts, batch, allowed, self.normalise)
        loss = -(scores.gather(-1, batch.labels[..., None])[..., 0] * weight).sum()
        return torch.autograd.grad(loss, prompts)

    def _validate(self, jobs: list[Job], then: Callable[[Job, Progress], None] | None) -> None:
        judged = self._judged(jobs).tolist() if jobs else []
        for job, (accuracy, sound, finite) in zip(jobs, judged, strict=True):
            state = self.progress[job.name]
            state.validated.see(state.step, {"accuracy": accuracy}, {"prompt": state.prompt}, bool(finite), bool(sound))
            state.done = state.step >= self.total(job) or state.validated.done
            if then is not None:
                then(job, state)

    @torch.no_grad()
    def _judged(self, jobs: list[Job]) -> Tensor:
        """Validation accuracy of each prompt, whether all its scores are finite, and whether it is, (R, 3)."""
        found: dict[str, Tensor] = {}
        most = max(1, 4 * self.rows_per_pass)
        for count in sorted({len(job.validation) for job in jobs}):
            same, together = [job for job in jobs if len(job.validation) == count], max(1, most // count)
            for part in (same[first : first + together] for first in range(0, len(same), together)):
                prompts = torch.stack([self.progress[job.name].prompt for job in part])
                allowed = allowed_words([job.words for job in part], len(self.model.verbalizer), self.device)
                rows = torch.stack([job.validation for job in part])
                hits = [self._hits(prompts, some, allowed) for some in rows.split(most, 1)]
                right, known = (torch.cat(parts, 1) for parts in zip(*hits, strict=True))
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


def _order(job: Job, batch_size: int) -> ShuffledBatches:
    """The batches of rows that a job trains on."""
    n, seed = len(job.train), job.seed

    def order(epoch: int) -> Tensor:
        return job.train[epoch_order(n, seed, epoch)]

    return ShuffledBatches(n, batch_size, seed=seed, drop_last=False, order=order)


class _WholeModel(nn.Module):
    """A step that tunes all weights of a language model, without a soft prompt; dropout stays off."""

    def __init__(self, tuned: PromptedModel, tuning: Tuning, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tuned, self.tuning, self.loss = tuned, tuning, loss

    def parameter_groups(self) -> list[dict[str, Any]]:
        parameters = [p for p in self.tuned.model.parameters() if p.is_floating_point()]
        return [{"params": parameters, "lr": self.tuning.lr, "weight_decay": self.tuning.weight_decay}]

    def forward(self, batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.loss(rows) for name, rows in batches.items()}


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
    """Tune a copy of the model, without a soft prompt (the job's is (0, D)), and return it as it was best.

    Dropout stays off. It ends where it diverges, with a warning.
    """
    own = copy.deepcopy(model.model).float()
    tuned = PromptedModel(own, model.template, model.verbalizer, max_length=model.max_length)
    tuned.model.requires_grad_(True)
    allowed, prompt = allowed_words([job.words], len(tuned.verbalizer), device), job.prompt[None].to(device)

    def loss(rows: Tensor) -> Tensor:
        batch = pool.gather(rows[None].cpu())
        assert batch.labels is not None
        with mixed_precision(device, precision):
            scores = word_scores(tuned, prompt, batch, allowed, normalise)
        return -scores.gather(-1, batch.labels[..., None]).mean()

    @torch.no_grad()
    def evaluate(_: int) -> dict[str, float]:
        """Accuracy on the validation rows, NaN if some scores are."""
        hits = []
        for rows in job.validation.split(rows_per_pass):
            batch = pool.gather(rows[None])
            with mixed_precision(device, precision):
                scores = word_scores(tuned, prompt, batch, allowed, "vocabulary")
            assert batch.labels is not None
            right = (scores.argmax(-1)[0] == batch.labels[0]).double()
            hits.append(right.masked_fill(scores[0].isnan().any(-1), torch.nan))
        return {"accuracy": float(torch.cat(hits).mean())}

    batches = _order(job, tuning.batch_size)
    epoch, steps = len(batches), tuning.epochs * len(batches)
    how: dict[str, Any] = {"optimizer": "adamw", "schedule": "linear", "warmup_steps": tuning.warmup}
    how |= {"device": device, "cuda_graph": False, "log_every": epoch, "evaluate_every": epoch}
    settings = TrainSettings(steps, tuning.lr, **how)
    best = KeepBest(patience=tuning.patience, forgiving=True, name=f"the model of {job.name}")
    stream = TaskStream({"rows": batches}, "longest", seed=0, steps=steps)
    step = _WholeModel(tuned, tuning, loss)
    report = train(step, stream, settings, evaluate=evaluate, keep_best=best, title=f"tune for {job.name}")
    best.weights.clear()  # the model has them
    if best.value < 0:  # there was none but the start
        best.value = evaluate(0)["accuracy"]
    return tuned, Progress(job.prompt, best, report.steps, True)
