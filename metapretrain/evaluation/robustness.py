"""Accuracy of trained models on corrupted test images: how much they lose when the picture gets worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metapretrain.data.corruptions import CORRUPTIONS, corrupt
from metapretrain.data.images import ImageSet
from metapretrain.errors import InputError
from metapretrain.evaluation.representation import accuracy, subsample
from metapretrain.files import json_bytes, read_json, write_file
from metapretrain.nests import evaluation_mode

SEVERITIES = (1, 3, 5)
MOST = 1000  # test images that are corrupted, a part fixed by the seed where there are more

Predict = Callable[[Tensor], Tensor]


class CorruptedImages:
    """Every corruption, in `severities` of 1..5, of at most `most` images; made once: 1 GB for 1,000 of STL-10."""

    def __init__(
        self, images: ImageSet, severities: Sequence[int] = SEVERITIES, most: int = MOST, seed: int = 0
    ) -> None:
        images.require_labels()
        if not len(images) or not severities:
            raise InputError(f"corruption needs images and severities, got {len(images)} and {list(severities)}")
        self.clean = images.subset(subsample(len(images), most, seed))
        self.severities, self.seed = tuple(severities), seed
        self._made: dict[tuple[str, int], Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of a corruption and its images uint8 (N, C, H, W), once per severity."""
        for name in CORRUPTIONS:
            for severity in self.severities:
                if (name, severity) not in self._made:
                    self._made[name, severity] = corrupt(self.clean.images, name, severity, self.seed)
                yield name, self._made[name, severity]

    def score(self, predict: Predict) -> dict[str, float]:
        """Return accuracies (0..1) of `predict`, uint8 (N, C, H, W) to classes (N,).

        `corrupt_<name>_accuracy` is the mean over severities, `corrupt_accuracy` the mean of those over corruptions,
        `corrupt_clean_accuracy` that of the same images as they are.
        """
        labels = self.clean.labels
        shares: dict[str, list[float]] = {}
        with evaluation_mode(predict):
            for name, images in self:
                shares.setdefault(name, []).append(accuracy(predict(images), labels))
            clean = accuracy(predict(self.clean.images), labels)
        means = {name: sum(values) / len(values) for name, values in shares.items()}
        scores = {f"corrupt_{name.replace('-', '_')}_accuracy": value for name, value in means.items()}
        return {"corrupt_accuracy": sum(means.values()) / len(means), "corrupt_clean_accuracy": clean, **scores}


def corrupt_runs(
    root: Path | str, images: Callable[[str, int], ImageSet], device: str | torch.device = "cpu"
) -> Iterator[tuple[Path, dict[str, float]]]:
    """Add the accuracies under corruption to the result of every finished run below `root` that has none.

    `images` gives the test images of a dataset in a size in pixels. Yields each run's folder and its new metrics.

    Raises:
        InputError: no finished run, a damaged one, or one whose data or classes are not those of the images.
    """
    from metapretrain.models.saved import load

    runs = sorted(path.parent for path in Path(root).rglob("result.json"))
    results = {run: read_json(run / "result.json") or {} for run in runs}
    rows = [run for run, result in results.items() if result.get("kind", "row") == "row"]
    if not rows:
        raise InputError(f"no finished run in {root}; name a run's folder or one with runs below it")
    corrupted: dict[tuple[str, int], CorruptedImages] = {}
    for run in rows:
        result: dict[str, Any] = results[run]
        if "corrupt_accuracy" in result.get("metrics", {}):
            continue
        model = load(run, device)
        key = (result["dataset"], model.image_size)
        if key not in corrupted:
            corrupted[key] = CorruptedImages(images(*key))
        part = corrupted[key]
        tested, read = result.get("data") or {}, part.clean.files
        other = [name for name in sorted(tested.keys() & read.keys()) if tested[name]["md5"] != read[name]["md5"]]
        if other:
            raise InputError(f"{run}: was tested on another {other[0]} than the one given now (checksums differ)")
        if part.clean.classes != model.classes:
            raise InputError(f"{run}: trained on classes {model.classes}, the images have {part.clean.classes}")
        model.polarity = None  # these images have that of the training; fog on a drawing may look like paper
        scores = part.score(model.predict)
        result["metrics"] |= scores
        result["corrupt"] = {"images": len(part.clean), "severities": list(part.severities), "seed": part.seed}
        write_file(run / "result.json", json_bytes(result))
        yield run, scores
