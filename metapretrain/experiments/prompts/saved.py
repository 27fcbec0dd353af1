"""Predictions for the user's own texts with the prompts of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from metapretrain.checks import check_device
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.text.data import read_rows, write_table
from metapretrain.files import read_json
from metapretrain.prompts import PromptedModel, SoftPrompt
from metapretrain.prompts.soft_prompt import CONFIG, OURS
from metapretrain.prompts.template import SECOND
from metapretrain.training.checkpoint import check_sums

PROMPTS = "prompts"  # the folder of a run that holds an adapter for each set


def predict_with_prompts(
    run: str | Path, tables: Mapping[str, Path], out: str | Path | None, device: str | torch.device, model: str | None
) -> list[Path]:
    """Predict the rows of files with a run's prompts: see :func:`metapretrain.experiments.saved.predict_files`.

    A prompt alone, as :meth:`metapretrain.prompts.PromptedModel.save` writes it, is for tables of any name.
    """
    from metapretrain.models.language_models import load_language_model

    run = Path(run)
    alone = (run / OURS).is_file()
    known = list(tables) if alone else sorted(path.name for path in (run / PROMPTS).iterdir() if path.is_dir())
    name = model if model is not None else _base_of(run, alone)
    for of in tables:
        one_of("set of the run", of, known)
    if not alone:
        check_sums(run)
    net, tokenizer = load_language_model(name)
    net = net.to(check_device(str(device)))
    written = []
    for of, file in tables.items():
        folder = run if alone else run / PROMPTS / of
        prompted = PromptedModel.load(folder, net, tokenizer)
        pairs = SECOND in prompted.template.text
        rows = read_rows(of, file, "pair-classification" if pairs else "classification")
        prompt = SoftPrompt.from_adapter(folder).weight
        predicted = prompted.classify(prompt, rows.first, rows.second).argmax(1)
        written.append(write_table((run / "own-texts" if out is None else Path(out)) / f"{of}.csv", rows, predicted))
    return written


def _base_of(run: Path, alone: bool) -> str:
    """The language model that a run or a prompt is for."""
    file = run / (CONFIG if alone else "config.json")
    try:
        about = read_json(file) or {}
        name = about["base_model_name_or_path"] if alone else about["config"]["choices"]["model"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise InputError(f"{file} names no language model that the prompts are for; name it (--model)")
    return name
