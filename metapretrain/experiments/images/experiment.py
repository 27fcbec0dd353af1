"""An image experiment on the disk: a run folder per row and seed, pretrainings shared, all resumable; and the demo."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import decisive
from metapretrain.data.images import ImageSet
from metapretrain.data.registry import load_images
from metapretrain.evaluation.predictions import write_predictions
from metapretrain.evaluation.representation import accuracy, knn_predict, nearest_prototype, silhouette, subsample
from metapretrain.experiments.base import Experiment, Outcome
from metapretrain.experiments.command import Table, due, machine_of, table_arguments, tell, write_all
from metapretrain.experiments.images.data import ImageData, describe
from metapretrain.experiments.images.objectives import OBJECTIVES, sources
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.images.training import (
    SCHEDULED,
    ImageContext,
    ImageMethod,
    check_scheduled,
    encode,
    finetuning,
    new_encoder,
    pretraining,
    updates,
    views,
)
from metapretrain.experiments.recipe import Proto
from metapretrain.files import load_tensors
from metapretrain.models import Encoder
from metapretrain.models.saved import ENCODER, save_model
from metapretrain.nests import evaluation_mode
from metapretrain.protonet import prototypes
from metapretrain.report.layout import Column, Layout
from metapretrain.report.markdown import markdown_table, shown
from metapretrain.report.results import collect
from metapretrain.report.rows import by_seed, paired
from metapretrain.report.table import build_table
from metapretrain.training import RunFolder, TrainReport, train

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
        Column(
            "calibration",
            "calibration_error",
            "ECE %",
            optional=True,
            legend="ECE: expected calibration error on the test images, 15 bins (Guo et al., 2017).",
        ),
    ),
    main="test",
    legend=(
        "Mean ± half-width of the 95% interval over seeds (Student t). Test set 95%: Wilson interval at the "
        "mean, for the number of test images. Nearest prototype: the class of the nearest mean training "
        "embedding, without a head. kNN: the majority of the 20 nearest training images by cosine, fewer where a class "
        "has fewer images. Validation: training images held back for choices."
    ),
    baselines=(("supervised",), ("simclr", "simclr-frozen")),
)


@dataclass(frozen=True)
class TrainedImages:
    """An encoder, its head if it has one, what training did, and what a scheduler chose and spent."""

    encoder: Encoder
    head: nn.Module | None
    report: TrainReport
    schedule: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ImageExperiment(Experiment[ImageRecipe, ImageData, ImageMethod, TrainedImages, "ImageScores"]):
    """An image experiment: see `Experiment`; its plots are maps and confusion matrices."""

    layout: Layout | None = IMAGES

    def pretraining_run(self, method: ImageMethod) -> tuple[str, ImageMethod] | None:
        if method.pretraining is None:
            return None
        return f"pretrain-{method.pretraining}", ImageMethod(method.pretraining, head=None)

    def check_row(self, name: str, method: ImageMethod) -> None:
        """Refuse a budget that is too small for both phases, and a scheduled row without a schedule."""
        if method.objective == SCHEDULED:
            check_scheduled(self.recipe, self.machine)
        updates(self.recipe, self.data, method)

    def imports(self, method: ImageMethod) -> list[str]:
        trained = () if method.head is not None else sources().values() if method.objective == SCHEDULED else None
        objectives = [method.objective] if trained is None else trained
        encoder = ["torchvision"] * ((method.encoder or self.recipe.encoder) == "resnet18")
        return ["sklearn.neighbors", *encoder, *(name for one in objectives for name in OBJECTIVES[one].kind.imports)]

    def model(self, method: ImageMethod) -> dict[str, Any]:
        return describe(self.data, method.encoder or self.recipe.encoder, self.recipe.stem, method.head)

    @property
    def files(self) -> dict[str, Any]:
        more = {} if self.data.unlabelled is None else self.data.unlabelled.files
        return {**self.data.train.files, **self.data.test.files, **more}

    def plan(self, methods: Mapping[str, ImageMethod]) -> list[str]:
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

    def pretrain(self, context: ImageContext) -> TrainedImages:
        encoder, training = pretraining(context)
        report = train(**vars(training), run=context.run)
        scheduler: Any = training.stream.policy if context.method.objective == SCHEDULED else None
        schedule = None if scheduler is None else {"name": self.recipe.scheduler, **scheduler.spent()}
        return TrainedImages(encoder, None, report, schedule)

    def train(self, context: ImageContext) -> TrainedImages:
        """Train a new head on a pretrained encoder, or on a new one; the encoder learns too unless it is frozen."""
        encoder = new_encoder(context.data, context.recipe, context.seed, context.method.encoder)
        if context.start is not None:
            encoder.load_state_dict(load_tensors(context.start / ENCODER))
        head, training = finetuning(context, encoder.to(context.machine.device))
        report = train(**vars(training), run=context.run)
        return TrainedImages(encoder, head, report)

    def score(self, context: ImageContext, trained: TrainedImages) -> ImageScores:
        return score(trained.encoder, trained.head, self.data)

    def outcome(self, context: ImageContext, trained: TrainedImages, scores: ImageScores) -> Outcome:
        steps, before = trained.report.steps, context.before
        passes = views(context.method.objective) if context.shared else 1
        budget = {
            "encoder_passes": before["encoder_passes"] + steps * self.recipe.batch_size * passes,
            "updates": before["updates"] + steps,
        }
        speed = round(trained.report.updates_per_second * self.recipe.batch_size * passes, 1)
        extra: dict[str, Any] = {"images_per_s": speed}
        if context.shared:
            extra |= {} if trained.schedule is None else {"schedule": dict(trained.schedule)}
        else:
            budget |= {"pretrain_updates": before["updates"], "finetune_updates": steps}
            extra |= {"pretrain_wall_s": before["wall_s"]}
        return Outcome(scores.metrics, budget, extra)

    def save(self, context: ImageContext, trained: TrainedImages, scores: ImageScores) -> None:
        run, steps = context.folder, trained.report.steps
        if self.figures == context.seed and context.shared:
            new = new_encoder(self.data, self.recipe, context.seed).to(self.machine.device)
            maps = self._maps("before pretraining", new) | self._maps("after pretraining", trained.encoder)
            self._draw_maps(run, maps, steps)
        if len(test := self.data.test):
            if self.figures == context.seed and not context.shared:
                from metapretrain.report.figures import confusion_figure

                figure = confusion_figure(test.labels.cpu(), scores.test_predictions.cpu(), test.classes)
                run.figure("confusion", figure, steps)
            write_predictions(run.path / "predictions.csv", test.labels, scores.test_predictions, files=test.names)
        save_model(run.path, trained.encoder, trained.head, scores.prototypes)

    def _maps(self, when: str, encoder: Encoder) -> dict[str, tuple[Tensor, Tensor]]:
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
            images = self._some(self.data.test if name.startswith("test") else self.data.train).images
            words = [classes[y] for y in labels.tolist()]
            run.embedding(name.replace(", ", "-").replace(" ", "-"), z, words, images, step)

    def _some(self, part: ImageSet) -> ImageSet:
        return part.subset(subsample(len(part), self.map_points))


@dataclass(frozen=True)
class ImageScores:
    """Metrics (fractions), predictions of the test part (N,) and the class prototypes (C, D)."""

    metrics: dict[str, float]
    test_predictions: Tensor
    prototypes: Tensor


def score(encoder: nn.Module, head: nn.Module | None, data: ImageData) -> ImageScores:
    """Score features, and the head if there is one, on all parts; evaluation mode, no augmentation.

    `nearest_prototype_accuracy` and `knn_accuracy` use no head: the class means, or the 20 nearest by cosine (as
    many as the smallest class has, where that is fewer), of the training features. Without a head `test_accuracy` is
    left out and the predictions are those of the prototypes. A part without images is left out.
    """
    features = encode(encoder, data)
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    z = {name: features(part) for name, part in parts.items() if len(part)}
    labels = {name: parts[name].labels.to(values.device) for name, values in z.items()}
    nearest = {name: nearest_prototype(z["train"], labels["train"], z[name]) for name in z if name != "train"}
    metrics = {
        f"{'' if name == 'test' else name + '_'}nearest_prototype_accuracy": accuracy(predicted, labels[name])
        for name, predicted in nearest.items()
    }
    for name in ("train", "test"):
        if name in z and 2 <= len(labels[name].unique()) < len(z[name]):  # else it is not defined
            metrics[f"silhouette_{name}"] = silhouette(z[name], labels[name])
    if "test" in z:
        k = min(20, int(labels["train"].unique(return_counts=True)[1].min()))
        metrics["knn_accuracy"] = accuracy(knn_predict(z["train"], labels["train"], z["test"], k), labels["test"])
    predicted = nearest.get("test", labels["train"][:0])
    if head is not None:
        with evaluation_mode(head), torch.inference_mode():
            classes = {name: decisive(head(values)).argmax(1) for name, values in z.items()}
        predicted = classes.get("test", predicted)
        metrics |= {f"{name}_accuracy": accuracy(values, labels[name]) for name, values in classes.items()}
    centres, _ = prototypes(z["train"], labels["train"], len(data.train.classes))
    return ImageScores(metrics, predicted.cpu(), centres.cpu())


DEMO_METHODS = {name: ImageMethod(name) for name in ("supervised", "simclr", "prl-standard", "prl-query")}
DEMO_LABELS = 3  # per digit; SimCLR has all training images, without labels
# Chosen for all methods together by their mean accuracy on 400 held-out training images: of plain and strong
# augmentation, half of these rates and these.
DEMO_RECIPE = ImageRecipe(
    epochs=300,
    pretrain_share=0.7,
    batch_size=30,
    encoder="small-conv",
    supervised=ImagePhase(lr=0.1, augment="strong"),
    prl=ImagePhase(lr=0.1, augment="strong"),
    simclr=ImagePhase(lr=0.1, augment="strong"),
    frozen=ImagePhase(lr=0.1, augment="strong"),
    unfrozen=ImagePhase(lr=0.04, augment="strong"),
    proto=Proto(distance="euclidean"),
    validation=147,
)


def run_demo(options: Namespace) -> int:
    """Run the demo with the options of `metapretrain demo`; finished runs below `--out` are kept."""
    train, test = (load_images("digits", None, split) for split in ("train", "test"))
    recipe = replace(DEMO_RECIPE, epochs=20) if options.smoke else DEMO_RECIPE
    data = ImageData.of(train, test, recipe.validation)
    some = torch.cat([(data.train.labels == label).nonzero()[:DEMO_LABELS, 0] for label in range(10)])
    options.tag = "" if options.smoke else "demo"
    experiment = ImageExperiment(
        "demo",
        "digits",
        recipe=recipe,
        data=replace(data, train=data.train.subset(some.sort().values), unlabelled=data.train),
        machine=machine_of(options),
        map_points=200 if options.smoke else 500,
        **table_arguments(options) | {"resume": True},
    )
    command = ["-m", "metapretrain", "demo", "--out", str(options.out), "--device", options.device]
    command += ["--precision", options.precision, *["--smoke"] * options.smoke]
    command += ["--no-figures"] * options.no_figures + ["--log-to", ",".join(options.log_to)] * bool(options.log_to)
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # for models this small more threads gain little, and wait long on a busy machine
    try:
        for _, batch in due([Table(experiment, DEMO_METHODS)], options, command, end=_demo_table):
            tell(experiment.run(batch))
        return 0
    finally:
        torch.set_num_threads(threads)


def _demo_table(experiment: Experiment[Any, Any, Any, Any, Any]) -> str:
    """Write table and figures; return a row for each method and what the demo shows."""
    write_all(experiment)
    found = collect(experiment.root)
    rows = sorted(build_table(found).groups[0].rows, key=lambda row: list(DEMO_METHODS).index(row.method))
    cells = [[row.method, *(shown(row.scores[name]) for name in ("test", "nearest_prototype"))] for row in rows]
    best, *others = sorted(rows, key=lambda row: -row.scores["test"].mean)
    runs = by_seed(result for result in found.results if result["kind"] == "row")
    gaps = {row.method: paired(runs[best.method], runs[row.method], "test_accuracy") for row in others}
    above = [name for name, gap in gaps.items() if gap is not None and gap.known and gap.low > 0]
    level = [name for name in gaps if name not in above]
    told = f", higher than {' and '.join(above)} by the paired 95% interval over seeds" * bool(above)
    told += f", with no difference shown to {' and '.join(level)}" * bool(level)
    sentence = (
        f"Trained on {DEMO_LABELS} labelled images per digit, {best.method} has the highest test accuracy, "
        f"{best.scores['test'].mean:.1%}{told}: this shows what each method makes of the same few labels at equal "
        "compute, not how they compare with more labels, on other images or with a larger encoder."
    )
    kept = f"\nplots and all numbers: {experiment.root}; curves: tensorboard --logdir {experiment.root}\n"
    header = ["method", "test accuracy, %", "nearest prototype, %"]
    return "\n".join([kept, *markdown_table(header, cells), sentence])
