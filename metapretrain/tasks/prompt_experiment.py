"""A prompts experiment on the disk: pretrained prompts shared by all downstream sets, whose tunings are one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.sentence_sets import SentenceData
from metapretrain.episodes.groups import group_agreement
from metapretrain.evaluation.predictions import write_predictions
from metapretrain.prompts import PromptedModel, PromptMAML, SoftPrompt
from metapretrain.tasks.prompt_data import PromptData
from metapretrain.tasks.prompt_full import tune_model
from metapretrain.tasks.prompt_inputs import Places, PromptInputs
from metapretrain.tasks.prompt_methods import PromptMethod, PromptRecipe, passes_per_step
from metapretrain.tasks.prompt_pool import SENTIMENT, Pool, mixed_precision, predict, words_of
from metapretrain.tasks.prompt_pretraining import MetaRows, Pretrained, train_meta, train_mixed
from metapretrain.tasks.prompt_scores import Tuned, majorities, metrics_of
from metapretrain.tasks.prompt_stack import Job, Progress, Stack
from metapretrain.tasks.runs import Runs
from metapretrain.training import RunFolder

log = logging.getLogger(__name__)
Key = tuple[str, int]  # a method and a seed
NO_PRETRAINING = {"pretrain_reads": 0, "pretrain_passes": 0, "pretrain_updates": 0}


@dataclass(frozen=True)
class PromptExperiment(Runs[PromptRecipe, PromptData, PromptMethod]):
    """A prompts experiment: see :class:`metapretrain.tasks.runs.Runs`.

    Args:
        cache: where a converted language model is kept; None: the user's cache folder.
        rows_per_pass: rows that go through the model at a time while prompts are tuned; tasks_per_pass: meta tasks
            while they are pretrained, None for all. Neither changes what is computed.
    """

    cache: Path | None = None
    rows_per_pass: int = 64
    tasks_per_pass: int | None = None
    _kept: list[PromptInputs] = field(default_factory=list, repr=False, compare=False)

    @property
    def inputs(self) -> PromptInputs:
        """Model and tokens, made once."""
        if not self._kept:
            self._kept.append(PromptInputs(self.recipe, self.data, self.machine, self.cache))
        return self._kept[0]

    def pretraining_run(self, method: PromptMethod) -> tuple[str, PromptMethod] | None:
        """Return name and method of the pretraining that a row starts from, or None."""
        return None if method.pretraining is None else (f"pretrain-{method.pretraining}", method)

    def check_row(self, name: str, method: PromptMethod) -> None:
        """Refuse a budget of less than one step."""
        if method.grouping is not None:
            self.recipe.meta_steps(self.recipe.meta.clusters)

    def model(self, method: PromptMethod) -> dict[str, Any]:
        """Return what a saved prompt belongs to."""
        r = self.recipe
        return {"language_model": Path(r.model).name, "length": r.length, "template": r.template, **asdict(method)}

    @property
    def files(self) -> dict[str, Any]:
        """The files that were read, with checksums."""
        return self.data.files

    def plan(self, methods: Mapping[str, PromptMethod]) -> list[str]:
        """Return one line a run with its budget: what `--dry-run` prints."""
        r, lines = self.recipe, []
        sets = f"{len(self.data.sets)} sets, {r.examples} examples each, at most {r.tune.epochs} epochs"
        for name, method in methods.items():
            if method.objective == "mixed":
                steps, reads = r.mixed_steps(len(self.data.pretraining)), r.mixed.batch_size
            else:
                steps, reads = r.meta_steps(r.meta.clusters), r.meta_reads(r.meta.clusters)
            before = "no pretraining"
            if method.objective is not None:
                before = f"pretraining of {steps:,} steps x {reads} rows = {steps * reads:,} reads (one for all sets)"
            after = {"prompt": f"the prompt tuned on {sets}", "model": f"the model tuned on {sets}"}
            lines.append(f"{name}: {before}, {after.get(method.tuned, 'nothing tuned')}")
        return lines

    def rows(self, methods: Mapping[str, PromptMethod], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Run all rows for all seeds: pretrainings first, then every prompt is tuned in one batch."""
        pending: dict[Key, PromptMethod] = {}
        for seed in seeds:
            for name, method in methods.items():
                if (done := self.kept(name, method, seed)) is not None:
                    yield done
                else:
                    pending[name, seed] = method
        starts = self._starts(pending)
        tuned = self._tuned({key: start for key, start in starts.items() if pending[key].tuned == "prompt"})
        for (name, seed), method in pending.items():
            key = name, seed
            if method.tuned != "prompt":
                tuned[key] = {one.name: self._untuned(one, seed, method) for one in self.data.sets}
            yield self._finish(name, method, seed, tuned.pop(key))

    def row(self, name: str, method: PromptMethod, seed: int) -> dict[str, Any]:
        """Run one row for one seed; :meth:`rows` is faster for several."""
        return next(iter(self.rows({name: method}, [seed])))

    def _starts(self, pending: Mapping[Key, PromptMethod]) -> dict[Key, Tensor]:
        """The prompt that each row starts from."""
        found: dict[Key, Tensor] = {}
        for name in dict.fromkeys(name for name, _ in pending):
            seeds = [seed for other, seed in pending if other == name]
            method = pending[name, seeds[0]]
            plan = self.pretraining_run(method)
            prompts = {seed: self.inputs.start(method.start, seed) for seed in seeds}
            if plan is not None:
                prompts = self.pretrained(plan[0], method, prompts)
            found |= {(name, seed): prompt for seed, prompt in prompts.items()}
        return found

    def pretrained(self, name: str, method: PromptMethod, starts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Pretrain a prompt for each seed, unless that has been done already; seed to prompt (L, D)."""
        todo = {seed: p for seed, p in starts.items() if self.finished(name, method, seed) is None}
        with ExitStack() as opened:
            runs = {seed: opened.enter_context(self.open(name, method, seed)) for seed in todo}
            if method.objective == "mixed" and todo:
                make = partial(self._stack, self.inputs.pretraining(method.source), tuning=self._mixed_tuning())
                rows = len(self.inputs.texts(method.source))
                done = train_mixed(make, todo, rows, self.recipe, words_of(len(SENTIMENT), False), runs)
                for seed, trained in done.items():
                    self._save_pretrained(runs[seed], name, method, seed, trained, {})
            elif todo:
                for seed, prompt in todo.items():
                    self._save_pretrained(runs[seed], name, method, seed, *self._meta(method, seed, prompt, runs[seed]))
        # Read even where it was just written, so that a run that goes on later starts from the very same prompt.
        return {seed: SoftPrompt.from_adapter(self.path(name, seed) / "prompt")().detach() for seed in starts}

    def _mixed_tuning(self) -> Any:
        equal = self.recipe.budget == "equal"  # then all read as much, whenever they were best
        return replace(self.recipe.mixed, patience=None) if equal else self.recipe.mixed

    def _meta(
        self, method: PromptMethod, seed: int, prompt: Tensor, run: RunFolder
    ) -> tuple[Pretrained, dict[str, float]]:
        r, device = self.recipe, self.machine.device
        inputs, source = self.inputs, method.source
        groups = inputs.groups(method.grouping or "", source, seed)
        rows = MetaRows(groups, shots=r.meta.shots, held_out=r.held_out, seed=seed)
        soft = SoftPrompt(prompt).to(device)
        rate: Any = r.meta.inner_lr
        if r.meta.learned and method.objective == "meta":
            rate = nn.Parameter(torch.full((r.length, 1), rate, device=device))
        model = inputs.of_set()
        learner = PromptMAML(
            model.model, soft, model.template, model.verbalizer, inner_lr=rate, order=r.meta.order,
            inner_steps=r.meta.inner_steps if method.objective == "meta" else 0, chunk=self.tasks_per_pass,
            reduction=r.meta.reduction, max_length=r.max_length, normalise=r.normalise,
        )  # fmt: skip
        context = partial(mixed_precision, device, self.machine.precision)
        trained = train_meta(
            learner, rows, inputs.pretraining(source), r, run, context, objective=method.objective or ""
        )
        agreement = group_agreement(groups, inputs.texts(source).require_labels())
        if self.figures == seed and method.objective == "meta":
            self._draw(run, method, groups, trained.steps)
        sizes = {"smallest_task": min(rows.sizes), "largest_task": max(rows.sizes), "merged_rows": rows.moved}
        return trained, {"tasks": trained.tasks, "agreement_with_labels": agreement, **sizes}

    def _draw(self, run: RunFolder, method: PromptMethod, groups: Tensor, step: int) -> None:
        """A map of sentence embeddings, coloured by meta task: figure 4."""
        from metapretrain.evaluation.figures import tsne_figure

        z, names = self.inputs.features(method.source), [f"task {k}" for k in range(int(groups.max()) + 1)]
        maps = {f"meta tasks of {method.grouping}": (z, groups)}
        figure = tsne_figure(maps, names, reducer=self.reducer, max_points=self.map_points)
        run.figure(f"{self.reducer}-tasks", figure, step)

    def _save_pretrained(
        self, run: RunFolder, name: str, method: PromptMethod, seed: int, trained: Pretrained, about: Mapping[str, Any]
    ) -> None:
        objective = method.objective or ""
        r, tasks = self.recipe, trained.tasks
        reads = r.mixed.batch_size if objective == "mixed" else r.meta_reads(tasks)
        budget = {
            "pretrain_reads": trained.steps * reads,
            "pretrain_passes": trained.steps * passes_per_step(r, objective, tasks),
            "pretrain_updates": trained.steps, "updates": trained.steps,
        }  # fmt: skip
        metrics = {"validation_accuracy": trained.accuracy, "best_step": trained.best_step}
        if "agreement_with_labels" in about:
            metrics |= {"agreement_with_labels": about["agreement_with_labels"]}
        if method.source == "pseudo":
            metrics |= self.inputs.pseudo[1]
        extra = {"kind": "pretraining", "encoder": Path(r.model).name, "wall_s": round(trained.seconds, 3), **about}
        saved = self.inputs.of_set()
        self.finish(run, name, seed, metrics, budget, extra, lambda: saved.save(run.path / "prompt", trained.prompt))

    def _tuned(self, starts: Mapping[Key, Tensor]) -> dict[Key, dict[str, Tuned]]:
        """Tune every prompt on every set, all in one batch, and predict the test rows."""
        if not starts:
            return {}
        began = time.monotonic()
        (pool, places), jobs = self.inputs.few_shot(sorted({seed for _, seed in starts})), {}
        for (name, seed), prompt in starts.items():
            for one in self.data.sets:
                jobs[name, seed, one.name] = _job(f"{name} {seed} {one.name}", one, seed, prompt, places)
        log.info("tuning %d prompts in one batch", len(jobs))
        done = self._stack(pool, list(jobs.values()), tuning=self.recipe.tune).run()
        found: dict[Key, dict[str, Tuned]] = {key: {} for key in starts}
        for (name, seed, of), job in jobs.items():
            one = next(one for one in self.data.sets if one.name == of)
            found[name, seed][of] = self._tested(done[job.name], one, self.inputs.prompted)
        share = (time.monotonic() - began) / len(jobs)
        return {
            key: {of: replace(outcome, seconds=share) for of, outcome in outcomes.items()}
            for key, outcomes in found.items()
        }

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

    def _stack(self, pool: Pool, jobs: Sequence[Job], *, tuning: Any, **options: Any) -> Stack:
        m = self.machine
        return Stack(
            self.inputs.prompted, pool, jobs, tuning, normalise=self.recipe.normalise, rows_per_pass=self.rows_per_pass,
            device=m.device, precision=m.precision, **options,
        )  # fmt: skip

    def _finish(
        self, name: str, method: PromptMethod, seed: int, tuned: Mapping[str, Tuned]
    ) -> dict[str, Any]:
        r, before = self.recipe, dict(NO_PRETRAINING)
        about: dict[str, Any] = {"encoder": Path(r.model).name, "pretrain_wall_s": 0.0}
        if (plan := self.pretraining_run(method)) is not None and (done := self.finished(*plan, seed)) is not None:
            before = {key: done["budget"][key] for key in NO_PRETRAINING}
            about |= {"pretrain_wall_s": done["wall_s"]}
        about["wall_s"] = round(sum(one.seconds for one in tuned.values()), 3)
        steps = sum(one.progress.step for one in tuned.values())
        budget = {**before, "finetune_updates": steps, "updates": steps + before["pretrain_updates"]}
        metrics = metrics_of(self.data.sets, tuned) | majorities(self.data.sets)
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
