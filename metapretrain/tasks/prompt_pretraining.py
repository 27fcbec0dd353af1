"""Pretraining of prompts on meta tasks, and of prompts on all data as one task."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.prompts import OuterStep, PromptBatch, PromptMAML
from metapretrain.prompts.replay import Replay
from metapretrain.tasks.prompt_methods import PromptRecipe, passes_of_loss
from metapretrain.tasks.prompt_pool import Pool
from metapretrain.tasks.prompt_rows import MetaRows, crossed
from metapretrain.tasks.prompt_schedule import AllTasks, ScheduledTasks
from metapretrain.tasks.prompt_stack import Job, Progress, Stack
from metapretrain.training import RunFolder, checkpoint

log = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 60.0
CURVES = ("support_loss", "query_loss_before", "query_loss_after", "inner_gradient_norm", "accuracy")
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Pretrained:
    """A prompt (L, D) on the CPU, steps taken and kept, its held-out accuracy, meta tasks, and what more to tell.

    `diverged`: training ended with weights that were no numbers; the prompt is that of `best_step` all the same.
    """

    prompt: Tensor
    steps: int
    best_step: int
    accuracy: float
    tasks: int
    seconds: float
    about: Mapping[str, Any] = field(default_factory=dict)
    diverged: bool = False


def train_meta(
    learner: PromptMAML, rows: MetaRows, pool: Pool, recipe: PromptRecipe, run: RunFolder | None,
    context: Context = nullcontext, *, objective: str = "meta",
) -> Pretrained:  # fmt: skip
    """Train the learner's prompt on meta tasks and return it as it was best on held-out rows (Algorithm 1).

    Args:
        rows: which rows each step reads.
        pool: their tokens.
        run: losses and curves are logged there, and a run that was cut short goes on.
        context: called before each pass for the context of its precision.
        objective: "meta", or "multitask": all 2m rows of a task in one loss, with a learner of no inner step.
    """
    loop = _MetaLoop(learner, rows, pool, recipe, run, context, objective)
    return loop.run()


class _MetaLoop:
    def __init__(
        self, learner: PromptMAML, rows: MetaRows, pool: Pool, recipe: PromptRecipe, run: RunFolder | None,
        context: Context, objective: str,
    ) -> None:  # fmt: skip
        self.learner, self.rows, self.pool, self.recipe, self.folder = learner, rows, pool, recipe, run
        self.context, self.shots, self.multitask = context, recipe.meta.shots, objective == "multitask"
        self.steps = recipe.meta_steps(rows.tasks)
        self.every = max(1, self.steps // recipe.validations)
        groups: list[dict[str, Any]] = [{"params": [learner.prompt.weight], "lr": recipe.meta.lr}]
        if isinstance(learner.inner_lr, nn.Parameter):
            groups.append({"params": [learner.inner_lr], "lr": recipe.meta.rate_lr, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=recipe.meta.weight_decay)
        self.learned = [parameter for group in groups for parameter in group["params"]]
        self.outer_step, self.watched = OuterStep(learner, context), Replay(self._curves)
        self.chosen = AllTasks(rows)
        if recipe.meta.scheduler:
            self.chosen = ScheduledTasks(
                rows, recipe.meta.scheduler, self._losses, self.learned, seed=rows.seed, most=learner.chunk,
                passes=passes_of_loss(recipe, objective),
            )  # fmt: skip
        self.best = learner.prompt.weight.detach().clone()
        self.step = self.best_step = self.since = 0
        self.accuracy, self.before, self.lost = -1.0, 0.0, False
        self.started = self.saved = time.monotonic()

    def run(self) -> Pretrained:
        from tqdm.auto import tqdm

        self._resume()
        if not self.step:
            self._validate([])
        losses: list[Tensor] = []
        bar = tqdm(total=self.steps, initial=self.step, desc="pretrain", unit="step", disable=None, leave=False)
        with bar:
            while self.step < self.steps and not self._stopped():
                losses.append(self._update())
                self.step += 1
                bar.update()
                if self.step % self.every == 0 or self.step == self.steps:
                    self._validate(losses)
                    losses = []
                    self._save()
                elif time.monotonic() - self.saved > CHECKPOINT_SECONDS:
                    self._save()
        return Pretrained(
            self.best.cpu(), self.step, self.best_step, self.accuracy, self.rows.tasks, self._seconds(),
            self.chosen.about(), self.lost,
        )

    def _stopped(self) -> bool:
        return self.lost or (self.recipe.budget == "paper" and self.since >= self.recipe.meta.patience)

    def _halves(self, rows: Tensor) -> tuple[Any, Any]:
        return self.pool.gather(rows[:, : self.shots]), self.pool.gather(rows[:, self.shots :])

    def _pair(self, rows: Tensor) -> tuple[Any, Any]:
        """Support and query rows; all rows are both where no inner step is taken."""
        return (self.pool.gather(rows),) * 2 if self.multitask else self._halves(rows)

    def _losses(self, rows: Tensor) -> Tensor:
        with self.context():
            return self.learner.losses(*self._pair(rows)).float()

    def _update(self) -> Tensor:
        rows = self.chosen.at(self.step)
        if self.recipe.meta.query == "other" and not self.multitask:
            rows = crossed(rows, self.step)
        self.optimizer.zero_grad()
        losses = self.outer_step(*self._pair(rows))
        self.optimizer.step()
        return losses.mean()

    def _curves(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        with self.context():
            found = self.learner.curves(PromptBatch.of(*leaves[:4]), PromptBatch.of(*leaves[4:]))
        return tuple(found[name] for name in CURVES)

    def _validate(self, losses: Sequence[Tensor]) -> None:
        found = []
        for rows in self.rows.held_out:
            found.append(self.watched(*(leaf for part in self._halves(rows) for leaf in part.leaves())))
        means = [torch.stack(values).mean(0) for values in zip(*found, strict=True)]
        curves = dict(zip(CURVES, means, strict=True))
        accuracy = float(curves["accuracy"].mean())
        self.since += 1
        self.lost = self._diverged()
        if accuracy > self.accuracy and not self.lost:
            self.accuracy, self.best_step, self.since = accuracy, self.step, 0
            self.best = self.learner.prompt.weight.detach().clone()
        if self.folder is not None:
            values = {name: float(value.mean()) for name, value in curves.items()}
            tasks = {f"accuracy_task_{k}": float(value) for k, value in enumerate(curves["accuracy"])}
            self.folder.log(self.step, "validation", values | tasks | self.chosen.values())
            if losses:
                self.folder.log(self.step, "train", {"query_loss": torch.stack(list(losses)).mean()})

    def _diverged(self) -> bool:
        """Whether what is learned is no number any more; it stays so."""
        if all(bool(weight.isfinite().all()) for weight in self.learned):
            return False
        log.warning("diverged by step %d: the prompt of step %d is kept; lower meta.lr", self.step, self.best_step)
        return True

    def _seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def _save(self) -> None:
        self.saved = time.monotonic()
        if self.folder is None:
            return
        state = {
            "learner": {name: value for name, value in self.learner.named_parameters() if value.requires_grad},
            "optimizer": self.optimizer.state_dict(), "best": self.best, "best_step": self.best_step,
            "since": self.since, "accuracy": self.accuracy, "seconds": self._seconds(),
            "chosen": self.chosen.state(),
        }  # fmt: skip
        checkpoint.save(self.folder.checkpoints, self.step, state)

    def _resume(self) -> None:
        if self.folder is None:
            return
        found = checkpoint.load_latest(self.folder.checkpoints)
        self.folder.cut_back(-1 if found is None else found.step)
        if found is None:
            return
        state, learned = found.state, dict(self.learner.named_parameters())
        with torch.no_grad():
            for name, value in state["learner"].items():
                learned[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.chosen.load(state["chosen"])
        self.best = state["best"].to(self.best.device)
        self.step, self.best_step, self.since = found.step, state["best_step"], state["since"]
        self.accuracy, self.before = state["accuracy"], state["seconds"]
        self.folder.seconds_before, self.lost = self.before, self._diverged()


def train_mixed(
    make_stack: Callable[..., Stack], prompts: Mapping[int, Tensor], rows: int, recipe: PromptRecipe,
    words: tuple[int, ...], runs: Mapping[int, RunFolder],
) -> dict[int, Pretrained]:  # fmt: skip
    """Train a prompt for each seed on all rows as one task, batches of 4 (appendix A.2), the seeds in one stack.

    Args:
        make_stack: a :class:`Stack` of jobs with keyword arguments `steps`, `every`.
        prompts: seed to start.
        rows: pretraining rows N; as many are held out as meta tasks hold out, and those that fill no batch.
        runs: seed to its folder; each goes on from its own checkpoint.

    Raises:
        InputError: too few rows to train and to validate on.
    """
    held = min(2 * recipe.meta.shots * recipe.meta.clusters * recipe.held_out, rows // 5)
    if not held or rows - held < recipe.mixed.batch_size:
        raise InputError(f"{rows} pretraining rows leave none to validate on; give more")
    held += (rows - held) % recipe.mixed.batch_size  # whole batches: a step reads what the budget counts
    jobs = []
    for seed, prompt in prompts.items():
        order = torch.from_numpy(np.random.default_rng([seed, 1]).permutation(rows))
        jobs.append(Job(str(seed), prompt, order[held:], order[:held], words, seed))
    steps = recipe.mixed_steps(rows - held)
    stack = make_stack(jobs, steps=steps, every=max(1, steps // recipe.validations))
    started, before = time.monotonic(), dict.fromkeys(prompts, 0.0)
    for seed, run in runs.items():
        found = checkpoint.load_latest(run.checkpoints)
        run.cut_back(-1 if found is None else found.step)
        if found is not None:
            state = dict(found.state)
            before[seed] = run.seconds_before = state.pop("seconds")
            moved = {name: _on(value, stack.device) for name, value in state.items()}
            stack.progress[str(seed)] = Progress(**moved)

    def seconds(seed: int) -> float:
        return before[seed] + (time.monotonic() - started) / len(prompts)

    def note(job: Job, state: Progress) -> None:
        seed = int(job.name)
        runs[seed].log(state.step, "validation", {"accuracy": state.history[-1][1]})
        checkpoint.save(runs[seed].checkpoints, state.step, {**asdict(state), "seconds": seconds(seed)})

    done = stack.run(note)
    return {
        seed: Pretrained(
            state.best.cpu(), state.step, state.best_step, state.accuracy, 1, seconds(seed), diverged=state.diverged
        )
        for seed, state in ((int(name), state) for name, state in done.items())
    }


def _on(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
