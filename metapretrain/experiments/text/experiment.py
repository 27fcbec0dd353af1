"""A text experiment on the disk: one run folder a row and seed, pretrainings shared, all of it resumable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from metapretrain.draws import seeded
from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import METRICS, majorities
from metapretrain.evaluation.representation import subsample
from metapretrain.experiments.base import Experiment, Outcome
from metapretrain.experiments.saved import ENCODER, HEADS, PROTOTYPES, describe
from metapretrain.experiments.text.data import TextData, write_table
from metapretrain.experiments.text.objectives import added, build_heads, task_prototypes
from metapretrain.experiments.text.recipe import (
    PRETRAININGS,
    TextMethod,
    TextPretraining,
    TextRecipe,
    loss_weights,
    method_phase,
    one_sequence,
    ordinal_terms,
    updates,
)
from metapretrain.experiments.text.streams import share_of
from metapretrain.experiments.text.training import (
    Embedded,
    TextContext,
    TextReport,
    embed,
    finetuning,
    new_encoder,
    predictions,
    pretraining,
    prototype_scores,
    score,
)
from metapretrain.files import save_tensors
from metapretrain.models.text_encoders import TextEncoder, load_text_encoder, save_text_encoder
from metapretrain.report.layout import Column, Layout
from metapretrain.scheduling import parse_schedule
from metapretrain.training import RunFolder, train

MAP_ROWS = 100  # rows of each task in a map, as in the paper's figure 1


def task_column(task: str, metric: str) -> Column:
    """The column of a task's accuracy or correlation."""
    share = metric == "accuracy"
    title = f"{task.upper()} {'accuracy %' if share else 'Pearson'}"
    return Column(task, f"{task}_{metric}", title, share, True, f"{task}_dev", "proportion" if share else "correlation")


@dataclass(frozen=True)
class TrainedText:
    """An encoder, its heads (none after a pretraining), and what training did."""

    encoder: TextEncoder
    heads: nn.ModuleDict
    report: TextReport


@dataclass(frozen=True)
class TextScores:
    """Metrics, predictions of each part by task, and the embeddings of the training rows."""

    metrics: Mapping[str, float]
    predicted: Mapping[str, Mapping[str, torch.Tensor]]
    z_train: Embedded


@dataclass(frozen=True)
class TextExperiment(Experiment[TextRecipe, TextData, TextMethod, TrainedText, TextScores]):
    """A text experiment: see `Experiment`; its plots are maps of pretrained embeddings."""

    map_points: int = MAP_ROWS

    @property
    def table_layout(self) -> Layout:
        """The layout with a column for each task; without one, a table of the tasks and their mean."""
        tasks = tuple(task_column(task.name, METRICS[task.kind][0]) for task in self.data.tasks)
        if self.layout is not None:
            return self.layout.with_tasks(tasks)
        names = tuple(task.name for task in tasks)
        overall = Column("overall", "overall", "overall", False, parts=names)
        legend = "Dev parts; mean ± half-width of the 95% interval over seeds (Student t). Overall: plain mean."
        compared = (*names, "overall")
        return Layout((*tasks, overall), "overall", legend, first_row=True, compared=compared, open=True)

    def pretraining_run(self, method: TextMethod) -> tuple[str, TextPretraining] | None:
        name = method.pretraining
        return None if name is None else (f"pretrain-{name}", PRETRAININGS[name])

    def check(self, methods: Mapping[str, TextMethod], seeds: Sequence[int]) -> None:
        """Refuse what :meth:`Experiment.check` does, and an encoder that cannot be loaded."""
        super().check(methods, seeds)
        with seeded(0):
            new_encoder(self.recipe, 0)

    def check_row(self, name: str, method: TextMethod) -> None:
        """Refuse a budget that is too small for both phases, and weights or a schedule of other tasks."""
        if self.recipe.scheduler:
            schedule = parse_schedule(self.recipe.scheduler, [task.name for task in self.data.tasks])
            if schedule.probes and self.machine.world > 1:
                alone = f"the probes of {schedule.name} run in one process"
                raise InputError(f"{alone}; run rows side by side with --jobs-per-device")
            if method.surgery:
                raise InputError(f"{name} needs the gradients of all tasks at once: leave it out, or --set scheduler=")
        share_of(self.recipe.batch_size, self.machine.world)
        updates(self.recipe, self.data.tasks, method)
        loss_weights(self.recipe, self.data.tasks, method)

    def imports(self, method: TextMethod | TextPretraining) -> tuple[str, ...]:
        drawn = isinstance(method, TextPretraining) and self.figures is not None
        return ("transformers", "tokenizers", *["sklearn.manifold"] * drawn)

    def model(self, method: TextMethod | TextPretraining) -> dict[str, Any]:
        return describe(self.data.tasks, method, self.recipe)

    @property
    def files(self) -> dict[str, Any]:
        return self.data.files

    def plan(self, methods: Mapping[str, TextMethod]) -> list[str]:
        lines = []
        for name, method in methods.items():
            self.check_row(name, method)
            before, after = updates(self.recipe, self.data.tasks, method)
            source = f"{before:,} of pretraining {method.pretraining} (shared) + " if before else ""
            learns = "the heads" if method.frozen else "heads and encoder"
            chosen = self.recipe.scheduler
            rows = f"one task per update, by {chosen}" if chosen else "each task per update"
            spent = f"{source}{after:,} updates of {learns}, {self.recipe.batch_size} rows of {rows}"
            lines.append(f"{name}: {spent if method.trained else 'no training'}")
        return lines

    def pretrain(self, context: TextContext) -> TrainedText:
        encoder, training = pretraining(context)
        report = train(**vars(training), run=context.run)
        return TrainedText(encoder, nn.ModuleDict(), TextReport.of(report, training.stream, self.recipe.scheduler))

    def train(self, context: TextContext) -> TrainedText:
        """Train new heads on a pretrained encoder, or on a new one; the encoder learns too unless it is frozen."""
        method, start = context.method, context.start
        encoder = new_encoder(self.recipe, context.seed) if start is None else load_text_encoder(start / ENCODER)
        if not method.trained:
            heads = build_heads(self.data.tasks, method, self.recipe.sts_head, encoder.features)
            return TrainedText(encoder, heads, TextReport())
        heads, training = finetuning(context, encoder)
        report = train(**vars(training), run=context.run)
        return TrainedText(encoder, heads, TextReport.of(report, training.stream, self.recipe.scheduler))

    def score(self, context: TextContext, trained: TrainedText) -> TextScores:
        """Embed every part once, and score heads and nearest prototypes."""
        encoder, heads = trained.encoder, trained.heads
        split = "validation" if self.data.tuning else "dev"
        parts = ("train", split) if self.data.tuning else ("train", split, "test")
        z = {part: embed(encoder, self.data, self.recipe, part, context.method, self.machine) for part in parts}
        headed = [task for task in self.data.tasks if task.name in heads]
        predicted = {part: predictions(headed, heads, z[part]) for part in parts if part != "train"}
        metrics = prototype_scores(self.data.scored, z["train"], z[split], context)
        metrics |= majorities(self.data.scored)
        own = score(headed, split, predicted[split])
        if len(headed) < len(self.data.tasks):  # a mean over some of the tasks is not the table's
            own = {key: value for key, value in own.items() if not key.startswith("overall")}
        return TextScores(metrics | own, predicted, z["train"])

    def outcome(self, context: TextContext, trained: TrainedText, scores: TextScores) -> Outcome:
        method, before, report = context.method, context.before, trained.report
        if context.shared:
            budget = {"encoder_passes": self._passes(report, method), "updates": report.updates}
            return Outcome(scores.metrics, budget, self._about(report))
        steps = {"pretrain_updates": before["updates"], "finetune_updates": report.updates}
        passes = before["encoder_passes"] + (0 if method.frozen else self._passes(report, method))
        budget = {"encoder_passes": passes, "updates": sum(steps.values()), **steps}
        extra = {"pretrain_wall_s": before["wall_s"], **self._about(report, method.frozen)}
        return Outcome(scores.metrics, budget, extra)

    def save(self, context: TextContext, trained: TrainedText, scores: TextScores) -> None:
        run = context.folder
        if context.shared and self.figures == context.seed:
            before = self._maps(new_encoder(self.recipe, context.seed), context)
            self._draw(run, before, self._maps(trained.encoder, context), trained.report.updates)
        for task in self.data.tasks:
            for part, file in (("dev", f"{task.name}-dev.csv"), ("test", f"{task.name}.csv")):
                rows, predicted = getattr(task, part), scores.predicted.get(part, {})
                if rows is not None and task.name in predicted:
                    write_table(run.path / "predictions" / file, rows, predicted[task.name])
        if context.shared or not self.data.tuning:  # a trial's weights are used by nobody
            self._save_model(context, trained, scores.z_train)

    def _passes(self, report: TextReport, method: Any) -> int:
        """Sequences that training encoded: one a row, or two where pairs are encoded apart, all twice with R-Drop."""
        tasks = self.data.tasks
        rows = {task.name: 1 if one_sequence(method, task.kind) or not task.train.pairs else 2 for task in tasks}
        pretrained = isinstance(method, TextPretraining)
        times = 2 if (self.recipe.pretrain if pretrained else method_phase(self.recipe, method)).rdrop else 1
        return times * self.recipe.batch_size * sum(report.batches.get(name, 0) * rows[name] for name in rows)

    def _about(self, report: TextReport, frozen: bool = False) -> dict[str, Any]:
        """What a result says besides: its encoder, tokens a second and share of padding where training encoded any."""
        found: dict[str, Any] = {"encoder": self.recipe.encoder}
        if report.schedule is not None:
            found["schedule"] = dict(report.schedule)
        if not frozen and report.updates:
            found |= {"tokens_per_s": round(report.tokens_per_s, 1), "padding_share": round(report.padding_share, 4)}
        return found

    def _save_model(self, context: TextContext, trained: TrainedText, z_train: Embedded) -> None:
        folder, ordinal = context.folder.path, ordinal_terms(context.method, self.recipe) is not None
        save_text_encoder(trained.encoder, folder / ENCODER)
        state = {key: value.detach().cpu().clone() for key, value in trained.heads.state_dict().items()}
        if state:
            save_tensors(folder / HEADS, state)
        found = {task.name: task_prototypes(task, added(z_train[task.name]), ordinal) for task in self.data.tasks}
        save_tensors(folder / PROTOTYPES, {name: centres.cpu() for name, centres in found.items()})

    def _maps(self, encoder: TextEncoder, context: TextContext) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Embeddings and classes of some rows of each task, the same rows before and after."""
        split = "validation" if self.data.tuning else "dev"
        found = {}
        for name, z in embed(encoder, self.data, self.recipe, split, context.method, self.machine).items():
            task = next(task for task in self.data.tasks if task.name == name)
            rows = subsample(len(z[0]), self.map_points)
            found[name] = added(z).cpu()[rows], task.class_labels(getattr(task, split))[rows]
        return found

    def _draw(self, run: RunFolder, before: Mapping[str, Any], after: Mapping[str, Any], step: int) -> None:
        from metapretrain.report.figures import tsne_figure

        for task in self.data.tasks:
            if task.name not in before:
                continue
            scores = [f"{task.low + number:g}" for number in range(task.num_classes)]
            words = scores if task.regression else list(task.classes)
            panels = {"before pretraining": before[task.name], "after pretraining": after[task.name]}
            titled = {f"{task.name}, {when}": panel for when, panel in panels.items()}
            figure = tsne_figure(titled, words, reducer=self.reducer, max_points=self.map_points)
            run.figure(f"{self.reducer}-{task.name}", figure, step)
            for when, (z, classes) in panels.items():
                labels = [words[label] for label in classes.tolist()]
                run.embedding(f"{task.name}-{when.replace(' ', '-')}", z, labels, step=step)
