"""One run's TensorBoard events: scalars, images and hyper-parameters."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metapretrain.errors import InputError
from metapretrain.training.configuration import flatten
from metapretrain.training.event_files import cut_events
from metapretrain.training.files import json_bytes, plain

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LARGEST = 800  # pixels
BESIDE = ("knn", "majority", "nearest_prototype", "silhouette", "train", "validation")  # how names of metrics begin


class Tracker:
    """TensorBoard's writer for one folder; TensorBoard is imported at the first use.

    Args:
        folder: where the event files go.
        purge_step: events of this step and later ones, written before, are not to be shown.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder = folder
        self._purge_step = purge_step
        self._open: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter:
        """The writer, opened when first asked for.

        Raises:
            InputError: TensorBoard is not installed.
        """
        if self._open is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise InputError("TensorBoard is missing: pip install tensorboard") from error
            self._open = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._open

    def cut_back(self, step: int) -> None:
        """Drop every event after `step` that was written before this call.

        The new writer's `purge_step` says so to a TensorBoard that has read them already.
        """
        self.close()
        cut_events(self._folder, step)
        self._purge_step = step + 1
        _ = self.writer

    def scalars(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Write each value as ``<split>/<name>`` and flush, so that a kill loses none of them."""
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)
        self.writer.flush()

    def image(self, name: str, png: bytes, step: int) -> None:
        """Write an encoded PNG as the image `name`, at most :data:`LARGEST` pixels wide and high.

        TensorBoard makes a large image small by leaving out rows of pixels, which no letter survives.
        """
        from PIL import Image

        with Image.open(io.BytesIO(png)) as image:
            colours = image.convert("RGB")
        colours.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        pixels = np.asarray(colours)
        self.writer.add_image(name, pixels, step, dataformats="HWC")

    def hparams(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write the configuration (flattened) and the final metrics, as ``when_done/<name>``, for the HPARAMS tab.

        The tab has columns for the metrics of one run, and ticks the first few: a run with metrics that only
        accompany others (:data:`BESIDE`) names no columns, and other runs name these last.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        settings = {key: _setting(value) for key, value in flatten(config).items()}
        beside = [name for name in metrics if name.startswith(BESIDE)]
        names = [name for name in metrics if name not in beside]
        finals = {f"when_done/{name}": float(metrics[name]) for name in names + beside if metrics[name] is not None}
        columns, *session = hparams(settings, finals)
        self.writer.flush()
        with SummaryWriter(str(self._folder)) as writer:
            for summary in [columns, *session] if names else session:
                writer.file_writer.add_summary(summary)
            for tag, value in finals.items():  # the tag comes after those of the curves, train and validation
                writer.add_scalar(tag, value)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        if self._open is not None:
            self._open.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._open is not None:
            writer, self._open = self._open, None
            writer.close()


def _setting(value: Any) -> bool | int | float | str:
    value = plain(value)
    return value if isinstance(value, (bool, int, float, str)) else json_bytes(value).decode().strip()
