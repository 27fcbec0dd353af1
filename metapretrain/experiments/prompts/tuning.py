"""Tuning on a few examples: many prompts in one batch, and the whole model."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.draws import epoch_order
from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.experiments.prompts.data import Pool, allowed_words, word_scores
from metapretrain.experiments.prompts.recipe import Fair, Meta, Tuning
from metapretrain.graphs import Recorder, rounded_up
from metapretrain.nests import map_tensors
from metapretrain.prompts import PromptBatch, PromptedModel
from metapretrain.prompts.learner import clipped_steps
from metapretrain.training import KeepBest, TrainSettings, learning_rate, train
from metapretrain.training.environment import mixed_precision
from metapretrain.training.logs import ProgressLine


@dataclass(frozen=True)
class Job:
    """One prompt to tune: its start (L, D), rows of the pool to train and validate on, its words, its data order.

    `plan` gives the rows (B,) of each update; None: `train` in another order every epoch.
    """

    name: str
    prompt: Tensor
    train: Tensor
    validation: Tensor
    words: tuple[int, ...]
    seed: int
    plan: Callable[[int], Tensor] | None = None


@dataclass
class Progress:
    """Where the tuning of a prompt (L, D), or of the model, stands: steps taken, and its validations."""

    prompt: Tensor
    validated: KeepBest = field(default_factory=KeepBest)
    step: int = 0
    done: bool = False
    anchor: Tensor | None = None  # where Reptile's updates on this task began

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
        meta: the loss, and what is validated, is that of the second half of each task's 2m rows after inner steps on
            the first; validation also takes the halves the other way round. The rows of a job are those of tasks.
        reptile: after so many updates a prompt goes back to a part of the way, and its optimiser begins anew.
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
        meta: Meta | None = None,
        reptile: Fair | None = None,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.model, self.pool, self.tuning, self.normalise = model, pool, tuning, normalise
        self.jobs = sorted(jobs, key=lambda job: float(pool.lengths[job.train].float().mean()))
        self.steps, self.every, self.rows_per_pass = steps, every, rows_per_pass
        self.device, self.precision, self.meta, self.reptile = device, precision, meta, reptile
        self.progress = {job.name: self._begun(job) for job in self.jobs}
        self.width = tuning.batch_size if jobs[0].plan is None else len(jobs[0].plan(0))
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
        return Progress(prompt, best, anchor=prompt.detach().clone())

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
        state.step, state.done, state.anchor = given["step"], given["done"], state.prompt.detach().clone()

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
        for _ in range(steps):
            prompts = torch.stack([state.prompt.detach() for state in states])
            rows, weight = self._rows(jobs, [state.step for state in states])
            allowed = self._allowed(jobs, rows)
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
            for state, job in zip(states, jobs, strict=True):
                state.step += 1
                if self.reptile is not None and state.step % self.reptile.updates == 0:
                    self._go_back(job, state, self.reptile)

    @torch.no_grad()
    def _go_back(self, job: Job, state: Progress, reptile: Fair) -> None:
        """Leave the prompt a part of the way from where its updates on a task began."""
        assert state.anchor is not None
        part = learning_rate(state.step - reptile.updates, self.total(job), peak=reptile.rate, schedule="linear")
        state.anchor.lerp_(state.prompt, part)
        state.prompt.copy_(state.anchor)
        self.optimizer.state.pop(state.prompt, None)

    def _allowed(self, jobs: list[Job], rows: Tensor) -> Tensor:
        """Words of the jobs (R, W), or where the pool knows those of each row (R, B, W)."""
        if self.pool.allowed is not None:
            return self.pool.allowed[rows.to(self.device)]
        return allowed_words([job.words for job in jobs], len(self.model.verbalizer), self.device)

    def _rate(self, job: Job) -> float:
        if self.reptile is not None:
            return self.tuning.lr
        t, step, total = self.tuning, self.progress[job.name].step, self.total(job)
        return learning_rate(step, total, peak=t.lr, schedule="linear", warmup=t.warmup)

    def _rows(self, jobs: list[Job], at: list[int]) -> tuple[Tensor, Tensor]:
        """Rows of the pool and their weights in the mean loss of a job, (R, batch_size) each."""
        size = self.width
        rows = torch.zeros(len(jobs), size, dtype=torch.int64)
        weight = torch.zeros(len(jobs), size, dtype=torch.float64)
        for place, (job, step) in enumerate(zip(jobs, at, strict=True)):
            if job.plan is not None:
                rows[place], weight[place] = job.plan(step), 1 / size
                continue
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
        with mixed_precision(self.device, self.precision):
            if self.meta is not None:
                losses = self._losses(*self._after(self.meta, prompts, batch, allowed))
                return torch.autograd.grad(losses.sum() * 2 / weight.shape[1], prompts)
            losses = self._losses(prompts, batch, allowed)
        return torch.autograd.grad((losses * weight).sum(), prompts)

    def _losses(self, prompts: Tensor, batch: PromptBatch, allowed: Tensor) -> Tensor:
        """Negative log-probability of each row's label."""
        assert batch.labels is not None
        scores = word_scores(self.model, prompts, batch, allowed, self.normalise)
        return -scores.gather(-1, batch.labels[..., None])[..., 0]

    def _after(
        self, meta: Meta, prompts: Tensor, batch: PromptBatch, allowed: Tensor, turned: bool = False
    ) -> tuple[Tensor, PromptBatch, Tensor]:
        """Prompts (R x T, L, D) after inner steps on one half of the rows of each of T tasks, and the other half."""
        allowed = allowed if allowed.ndim == 3 else allowed[:, None].expand(-1, batch.shape[1], -1)
        leaves = [leaf.unflatten(1, (-1, 2, meta.shots)).flatten(0, 1) for leaf in (*batch.leaves(), allowed)]
        support, query = ([leaf[:, half] for leaf in leaves] for half in ((1, 0) if turned else (0, 1)))

        def loss(fast: Tensor) -> Tensor:
            return self._losses(fast, PromptBatch.of(*support[:-1]), support[-1]).mean(1).sum()

        stack = prompts.repeat_interleave(len(leaves[0]) // len(prompts), 0)
        options: dict[str, Any] = {"steps": meta.inner_steps, "order": meta.order, "most": meta.inner_clip}
        return clipped_steps(loss, stack, meta.inner_lr, **options), PromptBatch.of(*query[:-1]), query[-1]

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
        with self.model.uncompiled():
            return self._accuracies(jobs)

    def _accuracies(self, jobs: list[Job]) -> Tensor:
        found: dict[str, Tensor] = {}
        most = max(1, 4 * self.rows_per_pass)
        if self.meta is not None:  # whole tasks, and the inner steps keep a graph
            most = 2 * self.meta.shots * max(1, self.rows_per_pass // (2 * self.meta.shots))
        for count in sorted({len(job.validation) for job in jobs}):
            same, together = [job for job in jobs if len(job.validation) == count], max(1, most // count)
            for part in (same[first : first + together] for first in range(0, len(same), together)):
                prompts = torch.stack([self.progress[job.name].prompt for job in part])
                rows = torch.stack([job.validation for job in part])
                hits = [self._hits(prompts, some, self._allowed(part, some)) for some in rows.split(most, 1)]
                right, known = (torch.cat(parts, 1) for parts in zip(*hits, strict=True))
                finite = prompts.isfinite().flatten(1).all(1)
                judged = torch.stack([right.double().mean(1), known.all(1) & finite, finite], 1)
                found |= dict(zip((job.name for job in part), judged, strict=True))
        return torch.stack([found[job.name] for job in jobs]).cpu()

    def _hits(self, prompts: Tensor, rows: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows (R, N) are right, and which have scores that are numbers."""
        batch = self.pool.gather(rows)
        found: list[tuple[Tensor, PromptBatch, Tensor]] = [(prompts, batch, allowed)]
        with mixed_precision(self.device, self.precision):
            if self.meta is not None:
                found = [self._after(self.meta, prompts, batch, allowed, turned) for turned in (False, True)]
            scores = [word_scores(self.model, *one, "vocabulary") for one in found]
        known = [~one.isnan().any(-1) for one in scores]  # of a prompt that diverged, nothing is right
        right = [(one.argmax(-1) == of.labels) & ok for one, (_, of, _), ok in zip(scores, found, known, strict=True)]
        both = [torch.cat([part.reshape(len(rows), -1) for part in parts], 1) for parts in (right, known)]
        return both[0], both[1]


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
