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
        """Write an encoded PNG as the image `name`."""
        from PIL import Image

        with Image.open(io.BytesIO(png)) as image:
            pixels = np.asarray(image.convert("RGB"))
        self.writer.add_image(name, pixels, step, dataformats="HWC")

    def hparams(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write the configuration (flattened) and the final metrics for the HPARAMS tab."""
        settings = {key: _setting(value) for key, value in flatten(config).items()}
        finals = {f"hparam/{name}": float(value) for name, value in metrics.items() if value is not None}
        self.writer.flush()
        self.writer.add_hparams(settings, finals, run_name=".")

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
