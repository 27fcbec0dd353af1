"""What a run logs: `metrics.jsonl`, TensorBoard's events and its embedding projector, each cut back on resume."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from metapretrain.checks import require
from metapretrain.errors import InputError
from metapretrain.files import json_bytes, plain, sync_folder, write_all, write_whole
from metapretrain.training.settings import flatten

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
TOLD_SECONDS = 30.0


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl`` (``null`` values as NaN); a torn last line is left out.

    Other damaged lines are left out with a warning. Without the file there are no lines.
    """
    file = Path(path) / METRICS
    if not file.exists():
        return []
    lines: list[dict[str, Any]] = []
    bad = 0
    for text in file.read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(text)
            value = math.nan if line["value"] is None else float(line["value"])
            if abs(line["step"]) >= 2**63:
                raise ValueError
            found = {"step": int(line["step"]), "split": str(line["split"]), "name": str(line["name"])}
            lines.append({**found, "value": value})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            bad += 1
    if bad:
        _log.warning("%s: %d damaged lines are left out", file, bad)
    return lines


PLACE = ContextVar("PLACE", default="")  # of what is running among all runs, such as "run 4 of 21"


def titled(title: str) -> str:
    """The title of a progress bar, after the run's place among all runs."""
    return ", ".join(filter(None, (PLACE.get(), title)))


class ProgressLine:
    """Says every 30 seconds how far a training is, where no progress bar is shown; short trainings take turns."""

    told = time.monotonic()  # the last line, of whichever training

    def __init__(self, title: str, total: int, step: int = 0, unit: str = "updates") -> None:
        self.title, self.total, self.start, self.unit = titled(title), total, step, unit
        self.began = time.monotonic()

    def at(self, step: int) -> None:
        """Tell it, if it is time, after `step` updates."""
        now = time.monotonic()
        if now - ProgressLine.told >= TOLD_SECONDS:
            ProgressLine.told, done = now, step - self.start
            left = f", about {(now - self.began) / done * (self.total - step):.0f} s left" if done else ""
            _log.info("%s: %d of %d %s%s", self.title, step, self.total, self.unit, left)


class MetricsFile:
    """A run's ``metrics.jsonl``, open for appending; each call hands its lines to the operating system.

    A torn last line of an older session is cut. Every method raises OSError when the file cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._descriptor: int | None = None

    def append(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Append a line a value; ``null`` stands for one that is not finite."""
        text = "".join(
            json.dumps({"step": step, "split": split, "name": name, "value": plain(value)}) + "\n"
            for name, value in values.items()
        )
        if self._descriptor is None:
            if (self._run / METRICS).exists():  # a torn last line is cut
                os.truncate(self._run / METRICS, (self._run / METRICS).read_bytes().rfind(b"\n") + 1)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._run / METRICS, flags, 0o666)
        try:
            write_all(self._descriptor, text.encode())
        except OSError:
            self.close()  # the next call cuts what was written of the line
            raise

    def cut_back(self, step: int) -> None:
        """Drop the lines after `step`."""
        self.close()
        if (self._run / METRICS).exists():
            stay = [line for line in read_metrics(self._run) if line["step"] <= step]
            write_whole(self._run / METRICS, "".join(json.dumps(plain(line)) + "\n" for line in stay).encode())

    def close(self) -> None:
        """Close the file; the next :meth:`append` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_HEADER = 8 + 4  # the length of the data and the checksum of the length
_FOOTER = 4  # the checksum of the data
_HPARAMS, FINALS = "_hparams_/", "when_done/"  # how the tags begin that are written when a run has finished


def cut_events(folder: Path, step: int) -> None:
    """Drop what the event files of `folder` hold after `step`, the final metrics, and the torn end that a kill leaves.

    TensorBoard's `purge_step` needs files whose names sort by time. A record whose checksum is wrong is left out with a
    warning; where its length is damaged too, so is all that comes after it. No writer may be open.
    """
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        records, damaged = _records(data)
        if damaged:
            _log.warning("%s is damaged: %d bytes of it are left out; %s has the numbers", file, damaged, METRICS)
        stay = b"".join(record for record in records if _stays(record, step))
        if stay != data:
            write_whole(file, stay)
    sync_folder(folder)


def _records(data: bytes) -> tuple[list[bytes], int]:
    """The good records (length: 8 bytes, its checksum: 4, event, its checksum: 4) and the count of damaged bytes."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    good: list[bytes] = []
    start = damaged = 0
    while start + _HEADER <= len(data):
        length, of_length = struct.unpack_from("<QI", data, start)
        if masked_crc32c(data[start : start + 8]) != of_length:  # where the next record begins is not known
            return good, damaged + len(data) - start
        end = start + _HEADER + length + _FOOTER
        if end > len(data):
            break
        record = data[start:end]
        if masked_crc32c(record[_HEADER:-_FOOTER]) == struct.unpack("<I", record[-_FOOTER:])[0]:
            good.append(record)
        else:
            damaged += len(record)
        start = end
    return good, damaged


def _stays(record: bytes, step: int) -> bool:
    """Whether the event is the file's heading, or neither after `step`, nor of the end, nor an older purge mark."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event.FromString(record[_HEADER:-_FOOTER])
    if event.HasField("file_version"):
        return True
    of_the_end = any(value.tag.startswith((_HPARAMS, FINALS)) for value in event.summary.value)
    return bool(event.step <= step and not event.HasField("session_log") and not of_the_end)


POINTS, WORDS = "tensors.tsv", "metadata.tsv"
# Paul Tol's "bright" scheme and others that are seen on black and on white.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#EE7733", "#009988", "#CC3311", "#999999")


def write_embedding(
    run: Path, name: str, z: torch.Tensor, labels: Sequence[Any], images: torch.Tensor | None, step: int
) -> Path:
    """Write points for TensorBoard's embedding projector, beside those that are there; return their folder.

    Files: ``projector/<name>-<step>/{tensors.tsv,metadata.tsv,sprite.png}`` and ``projector_config.pbtxt``; the same
    name and step are replaced. `z`: (N, D) points; `labels`: N words or numbers; `images`: (N, 1 or 3, H, W), uint8 or
    float in 0..1, shown as the points, those of 1 channel in the colour of their label; None: squares of that colour.
    Raises InputError: the lengths differ or the shapes are others; OSError: it cannot be written.
    """
    if z.ndim != 2 or len(labels) != len(z) or (images is not None and len(images) != len(z)):
        shown = "no" if images is None else len(images)
        given = f"{tuple(z.shape)} points, {len(labels)} labels, {shown} images"
        raise InputError(f"the projector takes (N, D) points with a label (and image) each, not {given}")
    folder = run / "projector" / f"{name}-{step:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    table = io.StringIO()
    np.savetxt(table, z.detach().float().cpu().numpy(), fmt="%.6g", delimiter="\t")
    write_whole(folder / POINTS, table.getvalue().encode())
    words = [" ".join(str(label).split()) or "-" for label in labels]
    write_whole(folder / WORDS, ("\n".join(words) + "\n").encode())
    pixels = _thumbnails(words, images)
    write_whole(folder / "sprite.png", _sprite(pixels))
    place, (height, width) = folder.relative_to(run).as_posix(), pixels.shape[-2:]
    lines = [
        f'tensor_name: "{name}:{step:08d}"',
        f'tensor_path: "{place}/{POINTS}"',
        f'metadata_path: "{place}/{WORDS}"',
    ]
    dims = f"single_image_dim: {width} single_image_dim: {height}"
    lines.append(f'sprite {{ image_path: "{place}/sprite.png" {dims} }}')
    write_whole(folder / "entry.pbtxt", ("embeddings {\n  " + "\n  ".join(lines) + "\n}\n").encode())
    _list_embeddings(run)
    return folder


def read_embeddings(run: Path) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """Read what :func:`write_embedding` wrote: name to points float32 (N, D) and N words; of each name the latest."""
    found = {}
    for folder in sorted((run / "projector").glob("*-*"), key=lambda path: int(path.name.rpartition("-")[2])):
        try:
            z = torch.from_numpy(np.loadtxt(folder / POINTS, dtype=np.float32, delimiter="\t", ndmin=2))
            words = (folder / WORDS).read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}: its points cannot be read: {error}") from error
        if len(words) != len(z):
            raise InputError(f"{folder}: {len(z)} points with {len(words)} labels")
        found[folder.name.rpartition("-")[0]] = (z, words)
    return found


def cut_embeddings(run: Path, step: int) -> None:
    """Remove the points that were taken after `step`."""
    for folder in (folders := list((run / "projector").glob("*-*"))):
        if int(folder.name.rpartition("-")[2]) > step:
            shutil.rmtree(folder)
    if folders:
        _list_embeddings(run)


def _list_embeddings(run: Path) -> None:
    """Write the list that TensorBoard reads: the entries of all folders, one after the other."""
    entries = sorted((run / "projector").glob("*/entry.pbtxt"))
    write_whole(run / "projector_config.pbtxt", b"".join(entry.read_bytes() for entry in entries))


def _thumbnails(words: Sequence[str], images: torch.Tensor | None) -> torch.Tensor:
    """What is shown as the points, uint8 (N, 3, H, W): see :func:`write_embedding`."""
    pixels = torch.ones(len(words), 1, 8, 8) if images is None else images.detach().cpu()
    if not pixels.is_floating_point():
        pixels = pixels.float() / 255
    if pixels.shape[1] == 1:
        known = {word: place for place, word in enumerate(sorted(set(words)))}
        hexes = [COLOURS[known[word] % len(COLOURS)] for word in words]
        colours = torch.tensor([[int(colour[place : place + 2], 16) for place in (1, 3, 5)] for colour in hexes])
        pixels = pixels * colours.view(-1, 3, 1, 1) / 255
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def _sprite(pixels: torch.Tensor) -> bytes:
    """Return thumbnails as one PNG: square in count, row after row, as the projector cuts it."""
    from PIL import Image

    count, _, height, width = pixels.shape
    side = math.ceil(math.sqrt(count))
    sheet = torch.full((side * side, 3, height, width), 255, dtype=torch.uint8)
    sheet[:count] = pixels
    rows = sheet.view(side, side, 3, height, width).permute(0, 3, 1, 4, 2)
    file = io.BytesIO()
    Image.fromarray(rows.reshape(side * height, side * width, 3).numpy()).save(file, "PNG")
    return file.getvalue()


LARGEST = 800  # pixels
BESIDE = ("knn", "majority", "nearest_prototype", "silhouette", "train", "validation")  # how names of metrics begin


class Tracker:
    """TensorBoard's writer for one folder; TensorBoard is imported at the first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge_step: int | None = None  # events of this step and later ones, written before, are not to be shown
        self._open: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter:
        """The writer, opened when first asked for."""
        if self._open is None:
            tensorboard = require("torch.utils.tensorboard", "a run's log")
            self._open = tensorboard.SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._open

    def cut_back(self, step: int) -> None:
        """Drop every event after `step` that was written before this call, also in a TensorBoard that has read them."""
        self.close()
        cut_events(self._folder, step)
        self._purge_step = step + 1
        _ = self.writer

    def scalars(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Write each value as ``<split>/<name>``, of validations ``eval/<name>``: TensorBoard opens on it."""
        for name, value in values.items():
            self.writer.add_scalar(f"{'eval' if split == 'validation' else split}/{name}", value, step)
        self.writer.flush()

    def image(self, name: str, png: bytes, step: int) -> None:
        """Write an encoded PNG as the image ``figures/<name>``, at most :data:`LARGEST` pixels wide and high."""
        from PIL import Image

        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            colours = image.convert("RGB")
        colours.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        self.writer.add_image(f"figures/{name}", np.asarray(colours), step, dataformats="HWC")

    def hparams(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write the configuration (flattened) and the final metrics, as ``when_done/<name>``, for the HPARAMS tab.

        A run with metrics that only accompany others (:data:`BESIDE`) names no columns; other runs name these last.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        given = {key: plain(value) for key, value in flatten(config).items()}
        plainly = (bool, int, float, str)
        settings = {k: v if isinstance(v, plainly) else json_bytes(v).decode().strip() for k, v in given.items()}
        beside = [name for name in metrics if name.startswith(BESIDE)]
        names = [name for name in metrics if name not in beside]
        finals = {f"{FINALS}{name}": float(metrics[name]) for name in names + beside if metrics[name] is not None}
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
        writer, self._open = self._open, None
        if writer is not None:
            writer.close()


class Trackers:
    """Trackers of accelerate for one run, `wandb` or `mlflow`, started with the first values; none by default.

    One that fails later than at its start is left out with a warning: no training ends for it.
    """

    def __init__(self, names: Sequence[str], run: Path, config: Mapping[str, Any]) -> None:
        self._names, self._run, self._config = list(names), run, config
        self._open: dict[str, Any] = {}
        self._step = 0

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Hand values on; `step` None: that of the last call. InputError: a tracker cannot be started."""
        self._step = self._step if step is None else step
        while self._names:
            name = self._names.pop(0)
            try:
                self._open[name] = self._started(name)
            except Exception as error:  # each service has its own kinds
                told = " ".join(str(error).split())[:300]
                raise InputError(f"--log-to {name}: {told}; log in or start its server, or leave it out") from error
        for name, tracker in list(self._open.items()):  # mlflow's own notion of the run is that opened last
            more = {"run_id": tracker.tracker.info.run_id} if name == "mlflow" else {}
            self._calling(name, partial(tracker.log, dict(values), step=self._step, **more))

    def close(self) -> None:
        """Tell each that the run has ended."""
        for name, tracker in list(self._open.items()):
            self._calling(name, tracker.finish)
        self._open = {}

    def _started(self, name: str) -> Any:
        from accelerate import PartialState
        from accelerate.tracking import MLflowTracker, WandBTracker

        PartialState()  # the messages of trackers need it; one that is there already stays
        title, config = f"{self._run.parent.name}/{self._run.name}", flatten(self._config)
        if name == "mlflow":
            tracker = MLflowTracker("metapretrain", run_name=title, nested_run=True)
        else:  # rows that are trained together are open at once
            own = {"config": config, "dir": str(self._run), "reinit": "create_new"}
            tracker = WandBTracker("metapretrain", name=title, **own)
        if hasattr(tracker, "start"):  # before accelerate 1.7 it has begun already
            tracker.start()
        if name == "mlflow":
            tracker.store_init_configuration(config)
        return tracker

    def _calling(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            del self._open[name]
            _log.warning("%s is left out from now on: %s", name, " ".join(str(error).split())[:300])
