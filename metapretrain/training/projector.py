"""Points for TensorBoard's embedding projector, as files that need no TensorBoard to write."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metapretrain.errors import InputError
from metapretrain.training.files import write_whole

POINTS, WORDS = "tensors.tsv", "metadata.tsv"


def write_embedding(
    run: Path, name: str, z: torch.Tensor, labels: Sequence[Any], images: torch.Tensor | None, step: int
) -> Path:
    """Write points for TensorBoard's embedding projector, beside those that are there.

    Files: ``projector/<name>-<step>/{tensors.tsv,metadata.tsv,sprite.png}`` and ``projector_config.pbtxt``,
    whose paths are relative, so that the run folder may be moved. The same name and step are replaced.

    Args:
        run: the run folder.
        name: what the projector lists.
        z: (N, D) points.
        labels: N words or numbers.
        images: None, or (N, C, H, W) with 1 or 3 channels, uint8 or float in 0..1, shown as the points.
        step: the step they were taken at.

    Returns:
        The folder of the points.

    Raises:
        InputError: the lengths differ or the shapes are others.
        OSError: it cannot be written.
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
    if images is not None:
        write_whole(folder / "sprite.png", _sprite(images))
    place = folder.relative_to(run).as_posix()
    write_whole(folder / "entry.pbtxt", _entry(f"{name}:{step:08d}", place, images))
    _list_embeddings(run)
    return folder


def read_embeddings(run: Path) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """Read what :func:`write_embedding` wrote: name to points float32 (N, D) and N words; of each name the latest.

    Raises:
        InputError: a file is damaged.
    """
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
    """Remove the points that were taken after `step`.

    Raises:
        OSError: the list cannot be written.
    """
    folders = list((run / "projector").glob("*-*"))
    for folder in folders:
        if int(folder.name.rpartition("-")[2]) > step:
            shutil.rmtree(folder)
    if folders:
        _list_embeddings(run)


def _list_embeddings(run: Path) -> None:
    """Write the list that TensorBoard reads: the entries of all folders, one after the other."""
    entries = sorted((run / "projector").glob("*/entry.pbtxt"))
    write_whole(run / "projector_config.pbtxt", b"".join(entry.read_bytes() for entry in entries))


def _entry(title: str, place: str, images: torch.Tensor | None) -> bytes:
    """Return one `EmbeddingInfo` as protocol-buffer text."""
    lines = [
        f'tensor_name: "{title}"',
        f'tensor_path: "{place}/{POINTS}"',
        f'metadata_path: "{place}/{WORDS}"',
    ]
    if images is not None:
        height, width = images.shape[-2:]
        size = f"single_image_dim: {width} single_image_dim: {height}"
        lines.append(f'sprite {{ image_path: "{place}/sprite.png" {size} }}')
    return ("embeddings {\n  " + "\n  ".join(lines) + "\n}\n").encode()


def _sprite(images: torch.Tensor) -> bytes:
    """Return the images as one PNG: square in count, row after row, as the projector cuts it."""
    from PIL import Image

    pixels = images.detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8)
    count, channels, height, width = pixels.shape
    side = math.ceil(math.sqrt(count))
    sheet = torch.full((side * side, 3, height, width), 255, dtype=torch.uint8)
    sheet[:count] = pixels.expand(-1, 3, -1, -1) if channels == 1 else pixels
    rows = sheet.view(side, side, 3, height, width).permute(0, 3, 1, 4, 2)
    file = io.BytesIO()
    Image.fromarray(rows.reshape(side * height, side * width, 3).numpy()).save(file, "PNG")
    return file.getvalue()
