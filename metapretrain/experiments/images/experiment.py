"""An image experiment on the disk: one run folder a row and seed, pretrainings shared, all of it resumable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.images import ImageSet
from metapretrain.evaluation.predictions import write_predictions
from metapretrain.evaluation.representation import accuracy, knn_predict, nearest_prototype, silhouette, subsample
from metapretrain.experiments.base import NO_COST, Runs
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.training import (
    SCHEDULED,
    Method,
    check_scheduled,
    encode,
    finetune,
    new_encoder,
    pretrain,
    pretrain_scheduled,
    updates,
    views,
)
from metapretrain.experiments.recipe import Recipe
from metapretrain.files import load_tensors
from metapretrain.models import Encoder
from metapretrain.models.saved import ENCODER, save_model
from metapretrain.protonet import prototypes
from metapretrain.report.layout import Column, Layout
from metapretrain.training import RunFolder, TrainReport

IMAGES = Layout(
    columns=(
        Column("test", "test_accuracy", "test %", examples="test", interval="proportion", drawn="test accuracy"),
        Column("train", "train_accuracy", "train %"),
        Column("nearest_prototype", "nearest_prototype_accuracy", "nearest prototype %"),
        Column("knn", "knn_accuracy", "kNN %"),
        Column("validation", "validation_accuracy", "validation %"),
        Column(
            "corrupt",
            "corrupt_accuracy",
            "corrupted %",
            optional=True,
            legend="Corrupted: test images, mean over the standard corruptions and their severities.",
        ),
    ),
    main="test",
    legend=(
        "Mean ± half-width of the 95% interval over seeds (Student t). Test set 95%: Wilson interval at the "
        "mean, for the number of test images. Nearest prototype: the class of the nearest mean training "
        "embedding, without a head. Validation: training images held back for choices."
    ),
    baselines=(("supervised",), ("simclr", "simclr-frozen")),
)


@dataclass(frozen=True)
class Experiment(Runs[Recipe, ImageData, Method]):
    """An image experiment: see `Runs`; maps and confusion matrices are its figures."""

    layout: Layout | None = IMAGES

    def pretraining_run(self, method: Method) -> tuple[str, Method] | None:
        """Return name and method of the pretraining that a row shares with others, or None."""
        if method.pretraining is None:
            return None
        return f"pretrain-{method.pretraining}", Method(method.pretraining, head=None)

    def check_row(self, name: str, method: Method) -> None:
        """Refuse a budget that is too small for both phases, and a scheduled row without a schedule."""
        if method.objective == SCHEDULED:
            check_scheduled(self.recipe, self.machine)
        updates(self.recipe, self.data, method)

    def model(self, method: Method) -> dict[str, Any]:
        """Return what the saved model of a row needs to be built again."""
        return self.data.describe(method.encoder or self.recipe.encoder, self.recipe.stem, method.head)

    @property
    def files(self) -> dict[str, Any]:
        """The files that were read, with checksums."""
        return {**self.data.train.files, **self.data.test.files}

    def plan(self, methods: Mapping[str, Method]) -> list[str]:
        """Return one line a run with its budget: what `--dry-run` prints."""
        lines = []
        for name, method in methods.items():
            self.check_row(name, method)
            before, after = updates(self.recipe, self.data, method)
            batch = self.recipe.batch_size
            spent = f"{(before * views(method.objective) + after) * batch:,} encoder passes"
            source = f"{before:,} of {method.pretraining} (shared) + " if before else ""
            trained = "the head" if method.frozen else "encoder and head"
            last = f"{after:,} of {trained}" if after else ""
            lines.append(f"{name}: {spent}, updates {source}{last}".removesuffix(" + "))
        return lines

    def row(self, name: str, method: Method, seed: int) -> dict[str, Any]:
        """Run one row of the table for one seed; a finished one is kept if `resume` is set."""
        if (done := self.kept(name, method, seed)) is not None:
            return done
        if method.pretraining is None:
            encoder, before = new_encoder(self.data, self.recipe, seed, method.encoder), dict(NO_COST)
        else:
            encoder, before = self.pretraining(method.pretraining, seed)
        with self.open(name, method, seed) as run:
            head, report = finetune(encoder, method, self.data, self.recipe, seed, self.machine, run=run)
            steps = {"pretrain_updates": before["updates"], "finetune_updates": report.steps}
            spent = before["encoder_passes"] + report.steps * self.recipe.batch_size
            budget = {"encoder_passes": spent, "updates": sum(steps.values()), **steps}
            scored = score(encoder, head, self.data)
            if self.figures == seed and len(self.data.test):
                self._draw_confusion(run, scored.test_predictions, report.steps)
            extra = {"pretrain_wall_s": before["wall_s"], "images_per_s": self._speed(report, 1)}
            save = self._save(run, scored, encoder, head)
            return self.finish(run, name, seed, scored.metrics, budget, extra, save)

    def pretraining(self, objective: str, seed: int) -> tuple[Encoder, dict[str, Any]]:
        """Pretrain for one seed, or load the result if that has been done already; return encoder and cost."""
        name, method = f"pretrain-{objective}", Method(objective, head=None)
        encoder = new_encoder(self.data, self.recipe, seed).to(self.machine.device)
        if (done := self.finished(name, method, seed)) is not None:
            encoder.load_state_dict(load_tensors(self.written(name, seed) / ENCODER))
            return encoder, {**done["budget"], "wall_s": done["wall_s"]}
        with self.open(name, method, seed) as run:
            maps = self._maps("before pretraining", encoder) if self.figures == seed else {}
            told: dict[str, Any] = {}
            if objective == SCHEDULED:
                encoder, report, told = pretrain_scheduled(self.data, self.recipe, seed, self.machine, run=run)
            else:
                encoder, report = pretrain(objective, self.data, self.recipe, seed, self.machine, run=run)
            spent = report.steps * self.recipe.batch_size * views(objective)
            cost = {"encoder_passes": spent, "updates": report.steps}
            if maps:
                self._draw_maps(run, maps | self._maps("after pretraining", encoder), report.steps)
            scored = score(encoder, None, self.data)
            extra = {"kind": "pretraining", "images_per_s": self._speed(report, views(objective)), **told}
            save = self._save(run, scored, encoder, None)
            result = self.finish(run, name, seed, scored.metrics, cost, extra, save)
            return encoder, {**cost, "wall_s": result.get("wall_s", 0.0)}

    def _save(self, run: RunFolder, scored: Scores, encoder: Encoder, head: nn.Module | None) -> Callable[[], None]:
        def save() -> None:
            if len(self.data.test):
                write_predictions(run.path / "predictions.csv", self.data.test.labels, scored.test_predictions)
            save_model(run.path, encoder, head, scored.prototypes)

        return save

    def _speed(self, report: TrainReport, passes: int) -> float:
        return round(report.updates_per_second * self.recipe.batch_size * passes, 1)

    def _maps(self, when: str, encoder: Encoder) -> dict[str, tuple[Tensor, Tensor]]:
        """Features and labels of some training and test images: the panels of a map."""
        features = encode(encoder, self.data)
        parts = {"train": self.data.train, "test": self.data.test}
        some = {name: self._some(part) for name, part in parts.items() if len(part)}
        return {f"{name}, {when}": (features(part).cpu(), part.labels.cpu()) for name, part in some.items()}

    def _draw_maps(self, run: RunFolder, maps: Mapping[str, tuple[Tensor, Tensor]], step: int) -> None:
        from metapretrain.report.figures import tsne_figure

        classes = self.data.train.classes
        figure = tsne_figure(maps, classes, reducer=self.reducer, max_points=self.map_points)
        run.figure(self.reducer, figure, step)
        for name, (z, labels) in maps.items():
            images = self._some(self.data.test).images if name == "test, after pretraining" else None
            words = [classes[y] for y in labels.tolist()]
            run.embedding(name.replace(", ", "-").replace(" ", "-"), z, words, images, step)

    def _some(self, part: ImageSet) -> ImageSet:
        return part.subset(subsample(len(part), self.map_points))

    def _draw_confusion(self, run: RunFolder, predicted: Tensor, step: int) -> None:
        from metapretrain.report.figures import confusion_figure

        test = self.data.test
        run.figure("confusion", confusion_figure(test.labels.cpu(), predicted.cpu(), test.classes), step)


@dataclass(frozen=True)
class Scores:
    """Metrics (fractions), predictions of the test part (N,) and the class prototypes (C, D)."""

    metrics: dict[str, float]
    test_predictions: Tensor
    prototypes: Tensor


def score(encoder: nn.Module, head: nn.Module | None, data: ImageData) -> Scores:
    """Score features, and the head if there is one, on all parts; evaluation mode, no augmentation.

    `nearest_prototype_accuracy` and `knn_accuracy` use no head: the class means, or the 20 nearest by
    cosine, of the training features. Without a head `test_accuracy` is left out and the predictions are
    those of the prototypes. A part without images is left out.
    """
    features = encode(encoder, data)
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    z = {name: features(part) for name, part in parts.items() if len(part)}
    labels = {name: parts[name].labels.to(values.device) for name, values in z.items()}
    nearest = {
        name: nearest_prototype(z["train"], labels["train"], values) for name, values in z.items() if name != "train"
    }
    metrics = {
        f"{'' if name == 'test' else name + '_'}nearest_prototype_accuracy": accuracy(predicted, labels[name])
        for name, predicted in nearest.items()
    }
    for name in ("train", "test"):
        if name in z and 2 <= len(labels[name].unique()) < len(z[name]):  # else it is not defined
            metrics[f"silhouette_{name}"] = silhouette(z[name], labels[name])
    if "test" in z:
        metrics["knn_accuracy"] = accuracy(knn_predict(z["train"], labels["train"], z["test"]), labels["test"])
    predicted = nearest.get("test", labels["train"][:0])
    if head is not None:
        with torch.inference_mode():
            classes = {name: head(values).argmax(1) for name, values in z.items()}
        predicted = classes.get("test", predicted)
        metrics |= {f"{name}_accuracy": accuracy(values, labels[name]) for name, values in classes.items()}
    centres, _ = prototypes(z["train"], labels["train"], len(data.train.classes))
    return Scores(metrics, predicted.cpu(), centres.cpu())
