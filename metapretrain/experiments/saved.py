"""Finished runs: what a run folder holds, its model, and predictions for the user's own files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from metapretrain.errors import InputError
from metapretrain.files import read_json

if TYPE_CHECKING:
    from metapretrain.experiments.text.saved import SavedTextModel
    from metapretrain.models.saved import SavedLearner, SavedModel


def content_of(run: str | Path) -> str:
    """Return what a run folder holds: `prompts` (or one prompt), a model of `texts`, or one of `images`.

    A folder that cannot be read is one of `images`, whose reader says what is wrong.
    """
    folder = Path(run)
    if (folder / "prompts").is_dir() or (folder / "prompt.json").is_file():
        return "prompts"
    try:
        config = (read_json(folder / "config.json") or {}).get("config")
    except InputError:
        return "images"
    model = config.get("model") if isinstance(config, dict) else None
    return "texts" if isinstance(model, dict) and model.get("kind") == "text" else "images"


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
    if content_of(run) == "texts":
        from metapretrain.experiments.text.saved import load_text_model

        return load_text_model(run, device)
    from metapretrain.models.saved import load as load_images

    return load_images(run, device)


def predict_files(
    run: str | Path,
    tables: Mapping[str, Path],
    out: str | Path | None = None,
    device: str | torch.device = "cpu",
    *,
    model: str | None = None,
) -> list[Path]:
    """Predict the rows of tables of texts with a finished run; write `TASK.csv` for each and return the paths.

    Args:
        run: the folder of the run, or of a saved prompt.
        tables: by the task's name, a table with the columns `id` and `sentence`, or `sentence1` and `sentence2`.
        out: where the predictions go; None: `predictions` in the run's folder, `own-texts` in that of prompts.
        model: of prompts, the language model that they are for; None: the one that the run or the prompt names.

    Raises:
        InputError: no model of texts there; a task that the run has not; a table that cannot be read (see
            :func:`metapretrain.data.tables.read_texts`); no `out`, and the folder has predictions for other rows.
    """
    if content_of(run) == "prompts":
        from metapretrain.experiments.prompts.saved import predict_with_prompts

        return predict_with_prompts(run, tables, out, device, model)
    if model is not None:
        raise InputError(f"{run} has no prompts, whose language model --model would name; leave it out")
    from metapretrain.experiments.text.saved import predict_texts

    return predict_texts(run, tables, out, device)
