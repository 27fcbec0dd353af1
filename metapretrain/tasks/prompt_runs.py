"""Pretrained prompts on the disk: one run a pretraining and seed, shared by the rows and sets that start from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.episodes.groups import group_agreement
from metapretrain.errors import InputError
from metapretrain.prompts import PromptMAML, SoftPrompt
from metapretrain.tasks.prompt_data import PromptData
from metapretrain.tasks.prompt_inputs import PromptInputs
from metapretrain.tasks.prompt_lending import PROMPT, check_lent, take_over
from metapretrain.tasks.prompt_methods import PromptMethod, PromptRecipe, Tuning, passes_per_step
from metapretrain.tasks.prompt_pool import SENTIMENT, Pool, words_of
from metapretrain.tasks.prompt_pretraining import Pretrained, train_meta, train_mixed
from metapretrain.tasks.prompt_rows import MetaRows
from metapretrain.tasks.prompt_stack import Job, Stack
from metapretrain.tasks.runs import Runs
from metapretrain.training import RunFolder
from metapretrain.training.devices import mixed_precision
from metapretrain.training.files import plain

log = logging.getLogger(__name__)
NO_PRETRAINING = {"pretrain_reads": 0, "pretrain_passes": 0, "pretrain_updates": 0}


@dataclass(frozen=True)
class PretrainedPrompts(Runs[PromptRecipe, PromptData, PromptMethod]):
    """Runs that start from pretrained prompts: see :class:`metapretrain.tasks.runs.Runs`.

    Args:
        cache: where a converted language model is kept; None: the user's cache folder.
        rows_per_pass: rows that go through the model at a time while prompts are tuned; tasks_per_pass: meta tasks
            while they are pretrained, None for all. Neither changes what is computed.
        lender: the folder of another table, whose pretrained prompts serve here, too, where they are of the same
            choices; they are copied.
    """

    cache: Path | None = None
    rows_per_pass: int = 64
    tasks_per_pass: int | None = None
    lender: Path | None = None
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
        """Refuse a budget of less than one step, and fewer meta tasks than labels that they are to hold."""
        clusters = self.recipe.meta.clusters
        if method.grouping is not None:
            self.recipe.meta_steps(clusters)
        if method.grouping == "label" and clusters < len(SENTIMENT):
            raise InputError(f"{name} needs meta.clusters of at least {len(SENTIMENT)}, a label each; got {clusters}")

    def check(self, methods: Mapping[str, PromptMethod], seeds: Sequence[int]) -> None:
        """Refuse what :meth:`Runs.check` does, and pretrained prompts of another table that do not fit."""
        super().check(methods, seeds)
        if self.lender is not None and not self.lender.is_dir():
            raise InputError(f"no folder {self.lender} to take pretrained prompts from")
        plans = filter(None, map(self.pretraining_run, methods.values()))
        lent = [self._lent(*plan, seed) for plan in plans for seed in seeds]
        if self.lender is not None and lent and not any(lent):
            log.warning("%s has no pretraining of these rows and seeds: all is trained here", self.lender)

    def model(self, method: PromptMethod) -> dict[str, Any]:
        """Return what a saved prompt belongs to."""
        r = self.recipe
        return {"language_model": Path(r.model).name, "length": r.length, "template": r.template, **asdict(method)}

    @property
    def files(self) -> dict[str, Any]:
        """The files that were read, with checksums."""
        return self.data.files

    def files_of(self, method: PromptMethod) -> dict[str, Any]:
        """The files that a row read: those of all rows and, marked, those that get pseudo labels."""
        own = self.data.plain.files if method.source == "pseudo" else {}
        return {**self.files, **{name: {**record, "only": "pseudo labels"} for name, record in own.items()}}

    def config(self, method: PromptMethod) -> dict[str, Any]:
        """Return the choices, the model and the data of a row, and the files that only rows on pseudo labels read."""
        plain_files = {} if method.source == "labelled" else {"plain": {"files": self.data.plain.files}}
        return super().config(method) | plain_files

    def pretrained(self, name: str, method: PromptMethod, starts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Pretrain a prompt for each seed, unless that has been done already; seed to prompt (L, D)."""
        todo = {seed: p for seed, p in starts.items() if self.finished(name, method, seed) is None}
        for seed in list(todo):
            if (folder := self._lent(name, method, seed)) is not None:
                own = {"config": plain(self.whole_config(name, method, seed))}
                named = {**self.names, "counts": self.data.counts, "data": self.files_of(method)}
                with self.open(name, method, seed) as run:
                    take_over(folder, run.path, own, named)
                log.info("%s: the prompt of %s", run.path.name, folder)
                del todo[seed]
        with ExitStack() as opened:
            runs = {seed: opened.enter_context(self.open(name, method, seed)) for seed in todo}
            if method.objective == "mixed" and todo:
                make = partial(self.stack, self.inputs.pretraining(method.source), tuning=self._mixed_tuning())
                rows = len(self.inputs.texts(method.source))
                done = train_mixed(make, todo, rows, self.recipe, words_of(len(SENTIMENT), False), runs)
                for seed, trained in done.items():
                    self._save_pretrained(runs[seed], name, method, seed, trained, {})
            elif todo:
                for seed, prompt in todo.items():
                    self._save_pretrained(runs[seed], name, method, seed, *self._meta(method, seed, prompt, runs[seed]))
        # Read even where it was just written, so that a run that goes on later starts from the very same prompt.
        return {seed: SoftPrompt.from_adapter(self.written(name, seed) / PROMPT)().detach() for seed in starts}

    def _lent(self, name: str, method: PromptMethod, seed: int) -> Path | None:
        """The folder of a finished pretraining of the other table, if there is one.

        Raises:
            InputError: its choices or its data are others.
        """
        if self.lender is None or not (folder := self.lender / f"{name}-s{seed}").joinpath("result.json").is_file():
            return None
        check_lent(folder, self.whole_config(name, method, seed), all_data=method.source == "pseudo")
        return folder

    def _mixed_tuning(self) -> Tuning:
        equal = self.recipe.budget == "equal"  # then all read as much, whenever they were best
        return replace(self.recipe.mixed, patience=None) if equal else self.recipe.mixed

    def _meta(
        self, method: PromptMethod, seed: int, prompt: Tensor, run: RunFolder
    ) -> tuple[Pretrained, dict[str, Any]]:
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
            inner_clip=r.meta.inner_clip,
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
        return trained, {"tasks": trained.tasks, "agreement_with_labels": agreement, **sizes, **trained.about}

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
        if trained.diverged:
            budget["diverged"] = 1
        metrics = {"validation_accuracy": trained.accuracy, "best_step": trained.best_step}
        if "agreement_with_labels" in about:
            metrics |= {"agreement_with_labels": about["agreement_with_labels"]}
        if method.source == "pseudo":
            metrics |= self.inputs.pseudo[1]
        extra = {
            "kind": "pretraining", "encoder": Path(r.model).name, "wall_s": round(trained.seconds, 3),
            "data": self.files_of(method), **about,
        }  # fmt: skip
        saved = self.inputs.of_set()
        self.finish(run, name, seed, metrics, budget, extra, lambda: saved.save(run.path / PROMPT, trained.prompt))

    def stack(self, pool: Pool, jobs: Sequence[Job], *, tuning: Tuning, **options: Any) -> Stack:
        """Prompts to tune side by side."""
        m = self.machine
        return Stack(
            self.inputs.prompted, pool, jobs, tuning, normalise=self.recipe.normalise, rows_per_pass=self.rows_per_pass,
            device=m.device, precision=m.precision, **options,
        )  # fmt: skip
