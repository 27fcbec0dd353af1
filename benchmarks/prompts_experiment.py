"""A prompts experiment: prompts pretrained, tuned on few examples of each set, and tested; what a row is judged by."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from prompts_pretraining import MetaTasks, TrainedPrompt, train_meta
from torch import Tensor, nn

from metapretrain.checks import decisive
from metapretrain.data.texts import SentenceData
from metapretrain.draws import epoch_order, seeded
from metapretrain.episodes.groups import group_agreement
from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import f1
from metapretrain.evaluation.predictions import write_predictions
from metapretrain.evaluation.representation import accuracy
from metapretrain.experiments.base import Context, Experiment, Outcome
from metapretrain.experiments.prompts.data import (
    ALL_WORDS,
    Places,
    Pool,
    PromptData,
    PromptInputs,
    allowed_words,
    word_scores,
)
from metapretrain.experiments.prompts.recipe import SENTIMENT, PromptMethod, PromptRecipe, Tuning, passes_per_step
from metapretrain.experiments.prompts.tuning import Job, Progress, Stack, tune_model
from metapretrain.models.language_models import language_source, stored_bits
from metapretrain.models.text_encoders import build_text_encoder
from metapretrain.prompts import PromptedModel, PromptMAML, SoftPrompt
from metapretrain.report.layout import Column, Layout
from metapretrain.training import RunFolder, checkpoint
from metapretrain.training.environment import mixed_precision


def run_stack(stack: Stack, runs: Mapping[int, RunFolder], tasks: Mapping[int, int]) -> dict[int, TrainedPrompt]:
    """Train the jobs of a stack, named by their seeds; each goes on from the checkpoint in its folder."""
    started, before = time.monotonic(), dict.fromkeys(tasks, 0.0)
    for seed, run in runs.items():
        found = checkpoint.load_latest(run.checkpoints)
        run.cut_back(-1 if found is None else found.step)
        if found is not None:
            state = dict(found.state)
            before[seed] = run.seconds_before = state.pop("seconds")
            stack.load_state_of(str(seed), state)

    def seconds(seed: int) -> float:
        return before[seed] + (time.monotonic() - started) / len(tasks)

    def note(job: Job, state: Progress) -> None:
        seed = int(job.name)
        runs[seed].log(state.step, "validation", {"accuracy": state.history[-1][1]})
        checkpoint.save(runs[seed].checkpoints, state.step, {**stack.state_of(job.name), "seconds": seconds(seed)})

    def trained(seed: int, state: Progress) -> TrainedPrompt:
        validated, prompt = state.validated, state.best.cpu()
        found = prompt, state.step, validated.step, state.accuracy, tasks[seed], seconds(seed)
        return TrainedPrompt(*found, diverged=validated.diverged)

    return {int(name): trained(int(name), state) for name, state in stack.run(note).items()}


@dataclass(frozen=True)
class Tuned:
    """How a prompt, or a model, ended on one set, and the classes of the test rows (N,), None while tuning."""

    progress: Progress
    predicted: Tensor | None
    seconds: float


def metrics_of(sets: Sequence[SentenceData], tuned: Mapping[str, Tuned]) -> dict[str, float]:
    """Accuracy and macro-F1 of each set and their means; where something was tuned, validation accuracy too."""
    found: dict[str, float] = {}
    for one in sets:
        outcome = tuned[one.name]
        if outcome.predicted is not None:
            found |= _scores(one, outcome.predicted)
        if outcome.progress.history:
            found[f"validation_{one.name}_accuracy"] = outcome.progress.accuracy
    return found | _means(found, sets, ("", "validation_"))


def majority_scores(sets: Sequence[SentenceData]) -> dict[str, float]:
    """The same on the test rows for the most frequent class of each training part."""
    found: dict[str, float] = {}
    for one in sets:
        counts = torch.bincount(one.train.require_labels(), minlength=one.num_classes)
        constant = counts.argmax().expand(len(one.test))  # the lowest of equals
        found |= {f"majority_{name}": value for name, value in _scores(one, constant).items()}
    return found | _means(found, sets, ("majority_",))


def _scores(one: SentenceData, predicted: Tensor) -> dict[str, float]:
    labels = one.test.require_labels()
    macro = f1(labels.numpy(), predicted.numpy(), one.num_classes, macro=True)
    return {f"{one.name}_accuracy": accuracy(predicted, labels), f"{one.name}_f1": macro}


def _means(scores: Mapping[str, float], sets: Sequence[SentenceData], prefixes: Sequence[str]) -> dict[str, float]:
    found = {}
    for prefix, metric in product(prefixes, ("accuracy", "f1")):
        names = [f"{prefix}{one.name}_{metric}" for one in sets]
        if scores.keys() >= set(names):
            found[f"{prefix}mean_{metric}"] = sum(scores[name] for name in names) / len(names)
    return found


@torch.no_grad()
def predict_rows(
    model: PromptedModel,
    prompt: Tensor,
    pool: Pool,
    rows: Tensor,
    words: Sequence[int],
    *,
    device: str,
    precision: str,
    batch_size: int = 128,
) -> Tensor:
    """The class of each row under a prompt (L, D), int64 (N,) in 0..C-1, on the CPU."""
    order = torch.argsort(pool.lengths[rows], stable=True)
    allowed = allowed_words([words], len(model.verbalizer), device)
    found = torch.empty(len(rows), dtype=torch.int64)
    parts = []
    for part in order.split(batch_size):
        with mixed_precision(device, precision):
            scores = word_scores(model, prompt[None].to(device), pool.gather(rows[part][None]), allowed, "vocabulary")
        parts.append(decisive(scores[0][:, list(words)]).argmax(-1))
    found[order] = torch.cat(parts).cpu()
    return found


PROMPT = "prompt"  # the folder of a pretraining's weights
log = logging.getLogger("metapretrain.prompts_experiment")
PRETRAINING_COST = ("pretrain_reads", "pretrain_passes", "pretrain_updates")
PromptContext = Context[PromptRecipe, PromptData, PromptMethod]


@dataclass(frozen=True)
class PromptRun:
    """How tuning ended on each set, or how a pretraining did, with what its result says besides."""

    tuned: Mapping[str, Tuned] = field(default_factory=dict)
    pretrained: TrainedPrompt | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptExperiment(Experiment[PromptRecipe, PromptData, PromptMethod, PromptRun, dict[str, float]]):
    """A prompts experiment: pretrained prompts, tuned on the few examples of each set and tested.

    Args:
        cache: where a converted language model is kept; None: the user's cache folder.
        rows_per_pass: rows that go through the model at a time while prompts are tuned; tasks_per_pass: meta tasks
            while they are pretrained, None for all. Neither changes what is computed.
    """

    cache: Path | None = None
    rows_per_pass: int = 64
    tasks_per_pass: int | None = None
    _inputs: list[PromptInputs] = field(default_factory=list, repr=False, compare=False)

    @property
    def inputs(self) -> PromptInputs:
        if not self._inputs:
            self._inputs.append(PromptInputs(self.recipe, self.data, self.machine, self.cache))
        return self._inputs[0]

    @property
    def table_layout(self) -> Layout | None:
        """The layout with a column for each set."""
        if self.layout is None:
            return None
        names = [one.name for one in self.data.sets]
        return self.layout.with_tasks(
            Column(name, f"{name}_accuracy", f"{name} %", True, True, f"{name}_test", "proportion") for name in names
        )

    def pretraining_run(self, method: PromptMethod) -> tuple[str, PromptMethod] | None:
        return None if method.pretraining is None else (f"pretrain-{method.pretraining}", method)

    def check(self, methods: Mapping[str, PromptMethod], seeds: Sequence[int]) -> None:
        """Refuse what :meth:`Experiment.check` does, and an encoder for clusters that cannot be loaded."""
        super().check(methods, seeds)
        if any(method.grouping == "kmeans" or method.source == "pseudo" for method in methods.values()):
            with seeded(0):
                build_text_encoder(self.recipe.embedder, modules=False)

    def check_row(self, name: str, method: PromptMethod) -> None:
        """Refuse a budget of less than one step, and fewer meta tasks than labels that they are to hold."""
        clusters = self.recipe.meta.clusters
        if method.objective is not None and not len(self.data.pretraining):
            raise InputError(f"{name} is pretrained, and there are no rows for that; leave it out, or give --data-dir")
        if method.only_fair and not self._fair:
            raise InputError(f"{name} is a row of budget fair: give --recipe fair, or leave it out")
        if method.objective is not None:
            self.recipe.steps(method.objective, clusters)
        if method.grouping == "label" and clusters < len(SENTIMENT):
            raise InputError(f"{name} needs meta.clusters of at least {len(SENTIMENT)}, a label each; got {clusters}")

    def imports(self, method: PromptMethod) -> list[str]:
        stored = language_source(self.recipe.model, self.cache).endswith(".gguf")
        learned = method.grouping is not None or method.source == "pseudo"
        return ["transformers", *["gguf"] * stored, *["sklearn.cluster"] * learned]

    def model(self, method: PromptMethod) -> dict[str, Any]:
        r, own = self.recipe, {**asdict(method), "start": self._start_of(method)}
        if not method.labels:  # as in runs that began before there were such rows
            del own["labels"]
        return {"language_model": Path(r.model).name, "length": r.length, "template": r.template, **own}

    def _choices(self) -> dict[str, Any]:
        found = super()._choices()
        return found if self._fair else {name: value for name, value in found.items() if name != "fair"}

    @property
    def files(self) -> dict[str, Any]:
        return self.data.files

    def files_of(self, method: PromptMethod) -> dict[str, Any]:
        """The files that a row read: those of all rows and, marked, those that get pseudo labels."""
        own = self.data.plain.files if method.source == "pseudo" else {}
        return {**self.files, **{name: {**record, "only": "pseudo labels"} for name, record in own.items()}}

    def config(self, method: PromptMethod) -> dict[str, Any]:
        """Return the choices, the model and the data of a row, and the files that only rows on pseudo labels read."""
        found = super().config(method)
        if method.source != "labelled":
            found["plain"] = {"files": self.data.plain.files}
        words = {one.name: self.data.words_of(one) for one in self.data.sets}
        own = {name: given for name, given in words.items() if not {*given} <= {*ALL_WORDS} or name in self.data.words}
        return found | ({"words": own} if own else {})

    def batches(self, methods: Mapping[str, PromptMethod], seeds: Sequence[int]) -> Iterable[list[PromptContext]]:
        """The seeds of a row, whose prompts are tuned in one batch."""
        return ([self.context(name, method, seed) for seed in seeds] for name, method in methods.items())

    def train_together(self, contexts: Sequence[PromptContext]) -> Iterable[PromptRun]:
        """Train the prompts of all seeds in one batch, where they can be; others one after the other."""
        first = contexts[0]
        if first.shared and (first.method.objective == "mixed" or self._fair):
            return self._pretrained_together(contexts)
        if not first.shared and first.method.tuned == "prompt":
            return self._tuned(contexts)
        return super().train_together(contexts)

    def _start(self, context: PromptContext) -> Tensor:
        """The prompt that a run starts from."""
        if context.start is None:
            return self.inputs.start(self._start_of(context.method), context.seed)
        return SoftPrompt.from_adapter(context.start / PROMPT).weight.detach()

    @property
    def _fair(self) -> bool:
        return self.recipe.budget == "fair"

    def _start_of(self, method: PromptMethod) -> str:
        return self.recipe.fair.start if self._fair and method.objective is not None else method.start

    def _tuning_of(self, objective: str) -> Tuning:
        """How the prompts of a stack are pretrained: all read as much, whenever they were best, but in the paper."""
        r = self.recipe
        if r.budget == "paper":
            return r.mixed
        rate = {"meta": r.meta.lr, "reptile": r.tune.lr}.get(objective, r.mixed.lr)
        return replace(r.mixed, patience=None, lr=rate)

    def _pretrained_together(self, contexts: Sequence[PromptContext]) -> Iterable[PromptRun]:
        """The pretraining of a row, all seeds in one stack."""
        method, r = contexts[0].method, self.recipe
        objective, source, counts = method.objective or "", method.source, method.labels
        starts = {one.seed: self._start(one) for one in contexts}
        runs = {one.seed: one.folder for one in contexts}
        model = self.inputs.prompted
        if self.machine.compile:  # not the model of all rows, whose tuning stays as it is
            limits: dict[str, Any] = {"max_length": model.max_length, "normalise": model.normalise}
            model = PromptedModel(model.model, model.template, model.verbalizer, **limits, compile=True)
        pool = self._of_one_width(self.inputs.pretraining(source, counts))
        make = partial(self.stack, pool, model=model, tuning=self._tuning_of(objective))
        words = self.data.numbers_of(None)
        if objective != "mixed":
            tasks = {seed: self._meta_rows(method, seed) for seed in runs}
            counted = {seed: rows.tasks for seed, rows in tasks.items()}
            done = run_stack(fair_stack(make, starts, tasks, r, words, objective), runs, counted)
            for one in contexts:
                about = self._about(one, tasks[one.seed], done[one.seed].steps)
                yield PromptRun(pretrained=done[one.seed], about=about)
            return
        rows: Any = len(self.inputs.texts(source))
        if counts:  # as tasks have them, in groups drawn at random
            groups = {seed: self.inputs.groups("random", source, seed) for seed in runs}
            found = {seed: self.inputs.rows_by_labels(of, source, counts) for seed, of in groups.items()}
            rows = {seed: (of >= 0).nonzero()[:, 0] for seed, of in found.items()}
        done = run_stack(mixed_stack(make, starts, rows, r, words), runs, dict.fromkeys(runs, 1))
        yield from (PromptRun(pretrained=done[one.seed]) for one in contexts)

    def _meta_rows(self, method: PromptMethod, seed: int) -> MetaTasks:
        r, groups = self.recipe, self.inputs.groups(method.grouping or "", method.source, seed)
        if method.labels:
            groups = self.inputs.rows_by_labels(groups, method.source, method.labels)
        return MetaTasks(groups, shots=r.meta.shots, held_out=r.held_out, seed=seed)

    def _about(self, context: PromptContext, rows: MetaTasks, step: int) -> dict[str, Any]:
        """What the result of a pretraining on meta tasks says of these; it draws their map where that is asked for."""
        method = context.method
        groups = self.inputs.groups(method.grouping or "", method.source, context.seed)
        if self.figures == context.seed and method.objective == "meta":
            self._draw(context.folder, method, groups, step)
        agreement = group_agreement(groups, self.inputs.texts(method.source).require_labels())
        sizes = {"smallest_task": min(rows.sizes), "largest_task": max(rows.sizes), "merged_rows": rows.moved}
        return {"tasks": rows.tasks, "agreement_with_labels": agreement, **sizes}

    def pretrain(self, context: PromptContext) -> PromptRun:
        method, seed, run, prompt = context.method, context.seed, context.folder, self._start(context)
        r, device = self.recipe, self.machine.device
        inputs, source = self.inputs, method.source
        rows = self._meta_rows(method, seed)
        soft = SoftPrompt(prompt).to(device)
        rate: Any = r.meta.inner_lr
        if r.meta.learned and method.objective == "meta":
            rate = nn.Parameter(torch.full((r.length, 1), rate, device=device))
        model, pool = inputs.of_set(), self._of_one_width(inputs.pretraining(source))
        steps = r.meta.inner_steps if method.objective == "meta" else 0
        options: dict[str, Any] = {name: getattr(r.meta, name) for name in ("order", "inner_clip", "reduction")}
        options |= {"chunk": self.tasks_per_pass, "max_length": r.max_length, "normalise": r.normalise}
        options["compile"] = self.machine.compile
        parts = model.model, soft, model.template, model.verbalizer
        learner = PromptMAML(*parts, inner_lr=rate, inner_steps=steps, **options)
        precision = partial(mixed_precision, device, self.machine.precision)
        trained = train_meta(learner, rows, pool, r, run, precision, objective=method.objective or "")
        return PromptRun(pretrained=trained, about={**self._about(context, rows, trained.steps), **trained.about})

    def _of_one_width(self, pool: Pool) -> Pool:
        """The pool; for compiled layers all rows are as wide as the widest: each width would be compiled for itself."""
        if not self.machine.compile:
            return pool
        return replace(pool, lengths=torch.full_like(pool.lengths, pool.batch.input_ids.shape[1]))

    def _draw(self, run: RunFolder, method: PromptMethod, groups: Tensor, step: int) -> None:
        """A map of sentence embeddings, coloured by meta task: figure 4."""
        from metapretrain.report.figures import tsne_figure

        z, names = self.inputs.features(method.source), [f"task {k}" for k in range(int(groups.max()) + 1)]
        maps = {f"meta tasks of {method.grouping}": (z, groups)}
        figure = tsne_figure(maps, names, reducer=self.reducer, max_points=self.map_points)
        run.figure(f"{self.reducer}-tasks", figure, step)

    def _pretraining_outcome(
        self, context: PromptContext, trained: TrainedPrompt, scores: Mapping[str, float], about: Mapping[str, Any]
    ) -> Outcome:
        method, r, tasks = context.method, self.recipe, trained.tasks
        objective = method.objective or ""
        costs = r.reads_per_step(objective, tasks), passes_per_step(r, objective, tasks), 1
        budget = {name: trained.steps * cost for name, cost in zip(PRETRAINING_COST, costs, strict=True)}
        budget["updates"] = trained.steps
        if trained.diverged:
            budget["diverged"] = 1
        metrics = dict(scores)
        if "agreement_with_labels" in about:
            metrics |= {"agreement_with_labels": about["agreement_with_labels"]}
        if method.source == "pseudo":
            metrics |= self.inputs.pseudo[1]
        extra = {"encoder": self._model_name, "wall_s": round(trained.seconds, 3), "data": self.files_of(method)}
        return Outcome(metrics, budget, {**extra, **about})

    def stack(
        self, pool: Pool, jobs: Sequence[Job], *, tuning: Tuning, model: PromptedModel | None = None, **options: Any
    ) -> Stack:
        """Prompts to tune side by side."""
        options |= {"normalise": self.recipe.normalise, "rows_per_pass": self.rows_per_pass}
        return Stack(model or self.inputs.prompted, pool, jobs, tuning, **self._where, **options)

    @property
    def _model_name(self) -> str:
        """The language model with how its weights were stored, which then stands in the heading of each table."""
        return ", ".join(filter(None, [Path(self.recipe.model).name, stored_bits(self.inputs.prompted.model)]))

    @property
    def _where(self) -> dict[str, Any]:
        return {"device": self.machine.device, "precision": self.machine.precision}

    def plan(self, methods: Mapping[str, PromptMethod]) -> list[str]:
        r, lines = self.recipe, []
        most = "at most " * (r.budget == "paper")  # patience may end it earlier
        sets = f"{len(self.data.sets)} sets, {r.examples} examples each, at most {r.tune.epochs} epochs"
        for name, method in methods.items():
            self.check_row(name, method)
            before = "no pretraining"
            if method.objective is not None:
                tasks, rows = r.meta.clusters, len(self.data.pretraining)
                steps, reads = r.steps(method.objective, tasks, rows), r.reads_per_step(method.objective, tasks)
                read = f"{steps:,} steps x {reads} rows = {steps * reads:,} reads"
                before = f"pretraining of {most}{read} (one for all sets)"
            after = {"prompt": f"the prompt tuned on {sets}", "model": f"the model tuned on {sets}"}
            lines.append(f"{name}: {before}, {after.get(method.tuned, 'nothing tuned')}")
        return lines

    def _tuned(self, contexts: Sequence[PromptContext]) -> Iterable[PromptRun]:
        """Tune the prompts of all seeds on all sets in one batch, and predict the test rows."""
        began, name = time.monotonic(), contexts[0].name
        starts = {one.seed: self._start(one) for one in contexts}
        pool, places = self.inputs.few_shot(list(starts))
        jobs = {
            (seed, one.name): self._job(f"{name} {seed} {one.name}", one, seed, prompt, places)
            for seed, prompt in starts.items()
            for one in self.data.sets
        }
        log.info("%s: tuning %d prompts in one batch", name, len(jobs))
        done = self.stack(pool, list(jobs.values()), tuning=self.recipe.tune).run()

        def tested(seed: int) -> dict[str, Tuned]:
            states = ((one, done[jobs[seed, one.name].name]) for one in self.data.sets)
            return {one.name: self._tested(state, one, self.inputs.prompted) for one, state in states}

        found = [tested(context.seed) for context in contexts]
        share = (time.monotonic() - began) / len(jobs)
        return [PromptRun({of: replace(one, seconds=share) for of, one in tuned.items()}) for tuned in found]

    def train(self, context: PromptContext) -> PromptRun:
        """Tune the whole model on each set, or nothing."""
        return PromptRun({one.name: self._untuned(one, context.seed, context.method) for one in self.data.sets})

    def _untuned(self, one: SentenceData, seed: int, method: PromptMethod) -> Tuned:
        """Full tuning, or none."""
        began, model = time.monotonic(), self.inputs.prompted
        nothing = self.inputs.start("none", seed)
        state = Progress(nothing)
        if method.tuned == "model":
            pool, places = self.inputs.few_shot([seed])
            job, r = self._job(one.name, one, seed, nothing, places), self.recipe
            model, state = tune_model(model, pool, job, r.full, normalise=r.normalise, **self._where)
        return replace(self._tested(state, one, model), seconds=time.monotonic() - began)

    def _job(self, name: str, one: SentenceData, seed: int, prompt: Tensor, places: Places) -> Job:
        train, validation = places[seed, one.name]
        return Job(name, prompt, train, validation, self.data.numbers_of(one), seed)

    def _tested(self, state: Progress, one: SentenceData, model: PromptedModel) -> Tuned:
        predicted = None
        if not self.data.tuning:
            pool, words, size = self.inputs.test(one), self.data.numbers_of(one), 4 * self.rows_per_pass
            rows = torch.arange(len(pool))
            predicted = predict_rows(model, state.best, pool, rows, words, **self._where, batch_size=size)
        return Tuned(state, predicted, 0.0)

    def score(self, context: PromptContext, trained: PromptRun) -> dict[str, float]:
        """Accuracy and F1 of each set; of a pretraining, what validation says."""
        if trained.pretrained is not None:
            return {"validation_accuracy": trained.pretrained.accuracy, "best_step": trained.pretrained.best_step}
        metrics = metrics_of(self.data.sets, trained.tuned)
        return metrics if self.data.tuning else metrics | majority_scores(self.data.sets)

    def outcome(self, context: PromptContext, trained: PromptRun, scores: dict[str, float]) -> Outcome:
        if trained.pretrained is not None:
            return self._pretraining_outcome(context, trained.pretrained, scores, trained.about)
        before, tuned = context.before, trained.tuned.values()
        steps = sum(one.progress.step for one in tuned)
        cost = {key: before.get(key, 0) for key in PRETRAINING_COST}
        budget = {**cost, "finetune_updates": steps, "updates": steps + cost["pretrain_updates"]}
        if lost := before.get("diverged", 0) + sum(one.progress.validated.diverged for one in tuned):
            budget["diverged"] = lost
        extra: dict[str, Any] = {"encoder": self._model_name, "data": self.files_of(context.method)}
        extra |= {"pretrain_wall_s": before["wall_s"], "wall_s": round(sum(one.seconds for one in tuned), 3)}
        return Outcome(scores, budget, extra)

    def save(self, context: PromptContext, trained: PromptRun, scores: dict[str, float]) -> None:
        run = context.folder
        if trained.pretrained is not None:
            self.inputs.of_set().save(run.path / PROMPT, trained.pretrained.prompt)
            return
        run.cut_back(-1)
        for step, values in _histories(trained.tuned).items():
            run.log(step, "validation", values)
        for one in self.data.sets:
            outcome = trained.tuned[one.name]
            if outcome.predicted is not None:
                file = run.path / "predictions" / f"{one.name}.csv"
                write_predictions(file, one.test.require_labels(), outcome.predicted)
            if context.method.tuned == "prompt" and not self.data.tuning:
                self.inputs.of_set(one).save(run.path / "prompts" / one.name, outcome.progress.best)


def _histories(tuned: Mapping[str, Tuned]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for name, one in tuned.items():
        for step, share in one.progress.history:
            found.setdefault(step, {})[f"accuracy_{name}"] = share
    return dict(sorted(found.items()))


def mixed_stack(
    make_stack: Callable[..., Stack],
    prompts: Mapping[int, Tensor],
    rows: int | Mapping[int, Tensor],
    recipe: PromptRecipe,
    words: tuple[int, ...],
) -> Stack:
    """A prompt for each seed, to be trained on all rows as one task in batches of 4 (appendix A.2).

    Args:
        make_stack: a :class:`Stack` of jobs with keyword arguments `steps`, `every`; prompts: seed to start.
        rows: pretraining rows N, or those of each seed; as many are held out as meta tasks hold out, and those that
            fill no batch.

    InputError: too few rows to train and to validate on.
    """
    jobs, size, least = [], recipe.mixed.batch_size, 0
    for seed, prompt in prompts.items():
        own = torch.arange(rows) if isinstance(rows, int) else rows[seed]
        held = min(2 * recipe.meta.shots * recipe.meta.clusters * recipe.held_out, len(own) // 5)
        if not held or len(own) - held < size:
            raise InputError(f"{len(own)} pretraining rows leave none to validate on; give more")
        held += (len(own) - held) % size  # whole batches: a step reads what the budget counts
        order, least = own[epoch_order(len(own), seed, 1)], len(own) - held
        jobs.append(Job(str(seed), prompt, order[held:], order[:held], words, seed))
    steps = recipe.steps("mixed", 1, least)
    return make_stack(jobs, steps=steps, every=max(1, steps // recipe.validations))


def fair_stack(
    make_stack: Callable[..., Stack],
    prompts: Mapping[int, Tensor],
    tasks: Mapping[int, MetaTasks],
    recipe: PromptRecipe,
    words: tuple[int, ...],
    objective: str,
) -> Stack:
    """A prompt for each seed, to be trained on its meta tasks in turn.

    `objective` is "multitask", "meta" (MAML) or "reptile" (Nichol et al., 2018, with AdamW).
    """
    updates, steps = recipe.fair.updates, recipe.steps(objective, recipe.meta.clusters)

    def plan(rows: MetaTasks, step: int) -> Tensor:
        if objective == "reptile":
            return rows.in_turn(*divmod(step, updates), of=updates)
        count = recipe.fair.tasks
        return torch.cat([rows.in_turn(step * count + place) for place in range(count)])

    def job(seed: int, rows: MetaTasks) -> Job:
        held_out = torch.stack(rows.held_out).flatten()
        return Job(str(seed), prompts[seed], rows.training, held_out, words, seed, partial(plan, rows))

    every = max(1, steps // recipe.validations)
    if objective == "reptile":
        every = updates * max(1, every // updates)
    more: dict[str, Any] = {"meta": recipe.meta} if objective == "meta" else {}
    more |= {"reptile": recipe.fair} if objective == "reptile" else {}
    return make_stack([job(*one) for one in tasks.items()], steps=steps, every=every, **more)
