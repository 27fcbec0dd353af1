"""The model of any finished run: images, few-shot learners, texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from metapretrain.errors import InputError
from metapretrain.files import read_json

if TYPE_CHECKING:
    from metapretrain.experiments.text.saved import SavedTextModel
    from metapretrain.models.saved import SavedLearner, SavedModel


def load(run: str | Path, device: str | torch.device = "cpu") -> SavedModel | SavedLearner | SavedTextModel:
    """Load the model of a finished run folder; no code from the folder is run (safetensors and JSON only).

    Args:
        run: the folder that a benchmark or `metapretrain demo` wrote.
        device: where the model is put.

    Returns:
        a model in evaluation mode. Images: `.encode(images)`, `.predict(images)`, and `.adapt(images, labels)` for new
        classes (see :func:`metapretrain.models.saved.load`). Texts: `.encode(texts)`, `.predict(task, texts)` (see
        :class:`metapretrain.experiments.text.saved.SavedTextModel`).

    Raises:
        InputError: no run there, a run that has not finished, or weights that are missing, damaged or another model's.

    Example:
        >>> load("no-such-run")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: no-such-run is not a run folder: ...
    """
    if not isinstance(run, str | Path):
        raise InputError(f"a run is named by its folder, not by a {type(run).__name__}; name one below runs/")
    if is_text_run(run):
        from metapretrain.experiments.text.saved import load_text_model

        return load_text_model(run, device)
    from metapretrain.models.saved import load as load_images

    return load_images(run, device)


def is_text_run(run: str | Path) -> bool:
    """Whether a folder is that of a run of text tasks."""
    try:
        config = (read_json(Path(run) / "config.json") or {}).get("config")
    except InputError:  # the reader of images says what is wrong
        return False
    model = config.get("model") if isinstance(config, dict) else None
    return isinstance(model, dict) and model.get("kind") == "text"
