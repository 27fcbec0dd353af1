"""A prompts experiment on the disk: pretrained prompts shared by all downstream sets, whose tunings are one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metapretrain.data.sentence_sets import SentenceData
from metapretrain.evaluation.predictions import write_predictions
from metapretrain.prompts import PromptedModel
from metapretrain.tasks.prompt_full import tune_model
from metapretrain.tasks.prompt_inputs import Places
from metapretrain.tasks.prompt_methods import PromptMethod
from metapretrain.tasks.prompt_pool import predict, words_of
from metapretrain.tasks.prompt_runs import NO_PRETRAINING, PretrainedPrompts
from metapretrain.tasks.prompt_scores import Tuned, majorities, metrics_of
from metapretrain.tasks.prompt_stack import Job, Progress

log = logging.getLogger(__name__)


class PromptExperiment(PretrainedPrompts):
    """A prompts experiment: pretrained prompts, tuned on the few examples of each set and tested."""

    def plan(self, methods: Mapping[str, PromptMethod]) -> list[str]:
        """Return one line a run with its budget: what `--dry-run` prints."""
        r, lines = self.recipe, []
        most = "at most " * (r.budget == "paper")  # patience may end it earlier
        sets = f"{len(self.data.sets)} sets, {r.examples} examples each, at most {r.tune.epochs} epochs"
        for name, method in methods.items():
            self.check_row(name, method)
            if method.objective == "mixed":
                steps, reads = r.mixed_steps(len(self.data.pretraining)), r.mixed.batch_size
            else:
                steps, reads = r.meta_steps(r.meta.clusters), r.meta_reads(r.meta.clusters)
            before = "no pretraining"
            if method.objective is not None:
                read = f"{steps:,} steps x {reads} rows = {steps * reads:,} reads"
                before = f"pretraining of {most}{read} (one for all sets)"
            after = {"prompt": f"the prompt tuned on {sets}", "model": f"the model tuned on {sets}"}
            lines.append(f"{name}: {before}, {after.get(method.tuned, 'nothing tuned')}")
        return lines

    def rows(self, methods: Mapping[str, PromptMethod], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Run row after row: its pretrainings first, then the prompts of all its seeds and sets in one batch."""
        for name, method in methods.items():
            pending = []
            for seed in seeds:
                if (done := self.kept(name, method, seed)) is not None:
                    yield done
                else:
                    pending.append(seed)
            tuned = self._tuned(name, self._starts(name, method, pending)) if method.tuned == "prompt" else {}
            for seed in pending:
                outcomes = tuned.pop(seed, None)
                if outcomes is None:
                    outcomes = {one.name: self._untuned(one, seed, method) for one in self.data.sets}
                yield self._finish(name, method, seed, outcomes)

    def row(self, name: str, method: PromptMethod, seed: int) -> dict[str, Any]:
        """Run one row for one seed; :meth:`rows` is faster for several."""
        return next(iter(self.rows({name: method}, [seed])))

    def _starts(self, name: str, method: PromptMethod, seeds: Sequence[int]) -> dict[int, Tensor]:
        """The prompt that a row starts from, by seed."""
        prompts = {seed: self.inputs.start(method.start, seed) for seed in seeds}
        plan = self.pretraining_run(method)
        return prompts if plan is None else self.pretrained(plan[0], method, prompts)

    def _tuned(self, name: str, starts: Mapping[int, Tensor]) -> dict[int, dict[str, Tuned]]:
        """Tune the prompts of all seeds on all sets in one batch, and predict the test rows."""
        if not starts:
            return {}
        began = time.monotonic()
        pool, places = self.inputs.few_shot(list(starts))
        jobs = {
            (seed, one.name): _job(f"{name} {seed} {one.name}", one, seed, prompt, places)
            for seed, prompt in starts.items() for one in self.data.sets
        }  # fmt: skip
        log.info("%s: tuning %d prompts in one batch", name, len(jobs))
        done = self.stack(pool, list(jobs.values()), tuning=self.recipe.tune).run()
        tested = {
            seed: {
                one.name: self._tested(done[jobs[seed, one.name].name], one, self.inputs.prompted)
                for one in self.data.sets
            }
            for seed in starts
        }
        share = (time.monotonic() - began) / len(jobs)
        return {seed: {of: replace(one, seconds=share) for of, one in own.items()} for seed, own in tested.items()}

    def _untuned(self, one: SentenceData, seed: int, method: PromptMethod) -> Tuned:
        """Full tuning, or none."""
        began, model = time.monotonic(), self.inputs.prompted
        nothing = self.inputs.start("none", seed)
        state = Progress.at(nothing)
        if method.tuned == "model":
            pool, places = self.inputs.few_shot([seed])
            job = _job(one.name, one, seed, nothing, places)
            m = self.machine
            model, state = tune_model(
                model, pool, job, self.recipe.full, normalise=self.recipe.normalise, device=m.device,
                precision=m.precision,
            )  # fmt: skip
        return replace(self._tested(state, one, model), seconds=time.monotonic() - began)

    def _tested(self, state: Progress, one: SentenceData, model: PromptedModel) -> Tuned:
        predicted = None
        if not self.data.tuning:
            pool, m = self.inputs.test(one), self.machine
            predicted = predict(
                model, state.best, pool, torch.arange(len(pool)), words_of(one.num_classes, one.pairs), device=m.device,
                precision=m.precision, batch_size=4 * self.rows_per_pass,
            )  # fmt: skip
        return Tuned(state, predicted, 0.0)

    def _finish(
        self, name: str, method: PromptMethod, seed: int, tuned: Mapping[str, Tuned]
    ) -> dict[str, Any]:
        r, before, lost = self.recipe, dict(NO_PRETRAINING), sum(one.progress.diverged for one in tuned.values())
        about: dict[str, Any] = {"encoder": Path(r.model).name, "pretrain_wall_s": 0.0, "data": self.files_of(method)}
        if (plan := self.pretraining_run(method)) is not None and (done := self.finished(*plan, seed)) is not None:
            before = {key: done["budget"][key] for key in NO_PRETRAINING}
            about |= {"pretrain_wall_s": done["wall_s"]}
            lost += done["budget"].get("diverged", 0)
        about["wall_s"] = round(sum(one.seconds for one in tuned.values()), 3)
        steps = sum(one.progress.step for one in tuned.values())
        budget = {**before, "finetune_updates": steps, "updates": steps + before["pretrain_updates"]}
        if lost:
            budget["diverged"] = lost
        metrics = metrics_of(self.data.sets, tuned)
        if not self.data.tuning:
            metrics |= majorities(self.data.sets)
        with self.open(name, method, seed) as run:
            run.cut_back(-1)
            for step, values in _histories(tuned).items():
                run.log(step, "validation", values)

            def save() -> None:
                for one in self.data.sets:
                    outcome = tuned[one.name]
                    if outcome.predicted is not None:
                        file = run.path / "predictions" / f"{one.name}.csv"
                        write_predictions(file, one.test.require_labels(), outcome.predicted)
                    if method.tuned == "prompt" and not self.data.tuning:
                        self.inputs.of_set(one).save(run.path / "prompts" / one.name, outcome.progress.best)

            return self.finish(run, name, seed, metrics, budget, about, save)


def _job(name: str, one: SentenceData, seed: int, prompt: Tensor, places: Places) -> Job:
    train, validation = places[seed, one.name]
    return Job(name, prompt, train, validation, words_of(one.num_classes, one.pairs), seed)


def _histories(tuned: Mapping[str, Tuned]) -> dict[int, dict[str, float]]:
    """Validation accuracy of each set, by step."""
    found: dict[int, dict[str, float]] = {}
    for name, one in tuned.items():
        for step, accuracy in one.progress.history:
            found.setdefault(step, {})[f"accuracy_{name}"] = accuracy
    return dict(sorted(found.items()))
