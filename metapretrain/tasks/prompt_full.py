"""Full-model tuning on a few examples (appendix A.1 of Huang et al.)."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.prompts import PromptedModel
from metapretrain.tasks.prompt_methods import Tuning
from metapretrain.tasks.prompt_pool import Pool, allowed_words, word_scores
from metapretrain.tasks.prompt_stack import Job, Progress
from metapretrain.training.devices import mixed_precision
from metapretrain.training.schedule import learning_rate

log = logging.getLogger(__name__)


def tune_model(
    model: PromptedModel, pool: Pool, job: Job, tuning: Tuning, *,
    normalise: str = "vocabulary", device: str = "cpu", precision: str = "fp32", rows_per_pass: int = 256,
) -> tuple[PromptedModel, Progress]:  # fmt: skip
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
                "the model of %s diverged by step %d: that of step %d is kept; lower its lr", job.name, state.step,
                state.best_step,
            )  # fmt: skip
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
