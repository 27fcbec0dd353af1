"""An image experiment on the disk: one run folder a row and seed, pretrainings shared, all of it resumable."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.images import ImageSet
from metapretrain.errors import InputError
from metapretrain.evaluation.predictions import write_predictions
from metapretrain.evaluation.representation import accuracy, knn_predict, nearest_prototype, silhouette, subsample
from metapretrain.models import Encoder
from metapretrain.models.saved import ENCODER, save_model
from metapretrain.protonet import prototypes
from metapretrain.tasks.images import (
    ImageData,
    Machine,
    Method,
    encode,
    finetune,
    new_encoder,
    pretrain,
    updates,
    views,
)
from metapretrain.tasks.recipes import Recipe
from metapretrain.training import RunFolder, TrainReport
from metapretrain.training.checkpoint import load_tensors
from metapretrain.training.configuration import check_neighbours
from metapretrain.training.devices import wait_for_all

log = logging.getLogger(__name__)
NO_COST: Mapping[str, Any] = {"encoder_passes": 0, "updates": 0, "wall_s": 0.0}


@dataclass(frozen=True)
class Experiment:
    """What all rows of a table share.

    Args:
        benchmark: such as `stl10`; dataset and recipe name the folder below it.
        out: parent of all runs.
        figures: draw maps of embeddings and confusion matrices for this seed; None for none.
        map_points: images in a panel of a map.
        reducer: what maps are drawn by, `tsne` or `umap`.
        resume: go on with runs that were cut short and keep finished ones.
    """

    benchmark: str
    dataset: str
    recipe_name: str
    recipe: Recipe
    data: ImageData
    machine: Machine
    out: Path
    figures: int | None = 0
    resume: bool = False
    map_points: int = 1000
    reducer: str = "tsne"

    @property
    def root(self) -> Path:
        """The folder of all rows."""
        return self.out / self.benchmark / f"{self.dataset}-{self.recipe_name}"

    def path(self, name: str, seed: int) -> Path:
        """The folder of one run."""
        return self.root / f"{name}-s{seed}"

    def plan(self, methods: Mapping[str, Method]) -> list[str]:
        """Return one line a run with its budget: what `--dry-run` prints."""
        lines = []
        for name, method in methods.items():
            before, after = updates(self.recipe, self.data, method)
            batch = self.recipe.batch_size
            spent = f"{(before * views(method.objective) + after) * batch:,} encoder passes"
            source = f"{before:,} of {method.pretraining} (shared) + " if before else ""
            lines.append(f"{name}: {spent}, updates {source}{after:,} of the head's phase")
        return lines

    def check(self, methods: Mapping[str, Method], seeds: Sequence[int]) -> None:
        """Refuse now, before anything is trained, what :meth:`row` would refuse when its turn comes.

        Raises:
            InputError: a run that is there and `resume` is off, or that is in use, or that has another configuration;
                a budget that is too small; a seed of more than 32 bits.
        """
        for seed in seeds:
            if not 0 <= seed < 2**32:
                raise InputError(f"a seed is a whole number from 0 to {2**32 - 1}, got {seed}")
        runs = {}
        for name, method in methods.items():
            updates(self.recipe, self.data, method)
            runs[name] = method
            if method.pretraining is not None:
                runs[f"pretrain-{method.pretraining}"] = Method(method.pretraining, head=None)
        for seed in seeds:
            for name, method in runs.items():
                if (self.path(name, seed) / "config.json").is_file():
                    shared = method.head is None and (self.path(name, seed) / "result.json").is_file()
                    self._open(name, method, seed, resume=self.resume or shared).close()
        check_neighbours(self.root, {"choices": asdict(self.recipe), "data": self._data()})

    def _data(self) -> dict[str, Any]:
        return {"counts": self.data.counts, "files": {**self.data.train.files, **self.data.test.files}}

    def row(self, name: str, method: Method, seed: int) -> dict[str, Any]:
        """Run one row of the table for one seed; a finished one is kept if `resume` is set."""
        if self.resume and (done := self._finished(name, method, seed)) is not None:
            log.info("%s seed %d: already done", name, seed)
            return done
        if method.pretraining is None:
            encoder, before = new_encoder(self.data, self.recipe, seed, method.encoder), dict(NO_COST)
        else:
            encoder, before = self.pretraining(method.pretraining, seed)
        with self._open(name, method, seed) as run:
            head, report = finetune(encoder, method, self.data, self.recipe, seed, self.machine, run=run)
            steps = {"pretrain_updates": before["updates"], "finetune_updates": report.steps}
            spent = before["encoder_passes"] + report.steps * self.recipe.batch_size
            budget = {"encoder_passes": spent, "updates": sum(steps.values()), **steps}
            scored = score(encoder, head, self.data)
            if self.figures == seed and len(self.data.test):
                self._draw_confusion(run, scored.test_predictions, report.steps)
            return self._finish(
                run,
                name,
                seed,
                scored,
                encoder,
                head,
                budget,
                {
                    "pretrain_wall_s": before["wall_s"],
                    "images_per_s": self._speed(report, 1),
                },
            )

    def pretraining(self, objective: str, seed: int) -> tuple[Encoder, dict[str, Any]]:
        """Pretrain for one seed, or load the result if that has been done already; return encoder and cost."""
        name, method = f"pretrain-{objective}", Method(objective, head=None)
        encoder = new_encoder(self.data, self.recipe, seed).to(self.machine.device)
        if (done := self._finished(name, method, seed)) is not None:
            encoder.load_state_dict(load_tensors(self.path(name, seed) / ENCODER))
            return encoder, {**done["budget"], "wall_s": done["wall_s"]}
        with self._open(name, method, seed) as run:
            maps = self._maps("before pretraining", encoder) if self.figures == seed else {}
            encoder, report = pretrain(objective, self.data, self.recipe, seed, self.machine, run=run)
            spent = report.steps * self.recipe.batch_size * views(objective)
            cost = {"encoder_passes": spent, "updates": report.steps}
            if maps:
                self._draw_maps(run, maps | self._maps("after pretraining", encoder), report.steps)
            scored = score(encoder, None, self.data)
            result = self._finish(
                run,
                name,
                seed,
                scored,
                encoder,
                None,
                cost,
                {
                    "kind": "pretraining",
                    "images_per_s": self._speed(report, views(objective)),
                },
            )
            return encoder, {**cost, "wall_s": result.get("wall_s", 0.0)}

    def _finished(self, name: str, method: Method, seed: int) -> dict[str, Any] | None:
        if not (self.path(name, seed) / "result.json").is_file():
            return None
        with self._open(name, method, seed, resume=True) as run:
            return run.result()

    def _open(self, name: str, method: Method, seed: int, resume: bool | None = None) -> RunFolder:
        data = self.data
        config = {
            "benchmark": self.benchmark, "dataset": self.dataset, "recipe": self.recipe_name, "method": name,
            "seed": seed, "precision": self.machine.precision, "choices": asdict(self.recipe),
            "model": data.describe(method.encoder or self.recipe.encoder, self.recipe.stem, method.head),
            "data": self._data(),
        }  # fmt: skip
        return RunFolder.open(
            self.path(name, seed), config, resume=self.resume if resume is None else resume,
            main=self.machine.rank == 0, device=self.machine.device,
        )  # fmt: skip

    def _finish(
        self, run: RunFolder, name: str, seed: int, scored: Scores, encoder: Encoder, head: nn.Module | None,
        budget: Mapping[str, int], extra: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        if self.machine.rank != 0:
            wait_for_all(self.machine.world)
            return {}
        if len(self.data.test):
            write_predictions(run.path / "predictions.csv", self.data.test.labels, scored.test_predictions)
        save_model(run.path, encoder, head, scored.prototypes)
        run.hparams({"method": name, "seed": seed, "recipe": self.recipe_name}, scored.metrics)
        run.finish({
            "benchmark": self.benchmark, "dataset": self.dataset, "recipe": self.recipe_name, "method": name,
            "seed": seed, "kind": "row" if len(self.data.test) else "tuning", "metrics": scored.metrics,
            "counts": self.data.counts, "budget": dict(budget), **extra,
            "data": {**self.data.train.files, **self.data.test.files},
        })  # fmt: skip
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # the weights stand beside result.json
        wait_for_all(self.machine.world)  # the others may look for result.json now
        result = run.result() or {}
        log.info("%s seed %d: done in %.0f s", name, seed, result.get("wall_s", 0))
        return result

    def _speed(self, report: TrainReport, passes: int) -> float:
        return round(report.updates_per_second * self.recipe.batch_size * passes, 1)

    def _maps(self, when: str, encoder: Encoder) -> dict[str, tuple[Tensor, Tensor]]:
        """Features and labels of some training and test images: the panels of a map."""
        features = encode(encoder, self.data)
        parts = {"train": self.data.train, "test": self.data.test}
        some = {name: self._some(part) for name, part in parts.items() if len(part)}
        return {f"{name}, {when}": (features(part).cpu(), part.labels.cpu()) for name, part in some.items()}

    def _draw_maps(self, run: RunFolder, maps: Mapping[str, tuple[Tensor, Tensor]], step: int) -> None:
        from metapretrain.evaluation.figures import tsne_figure

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
        from metapretrain.evaluation.figures import confusion_figure

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
        name: nearest_prototype(z["train"], labels["train"], values)
        for name, values in z.items()
        if name != "train"
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
