"""Predictions for the user's own texts with the prompts of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from metapretrain.devices import check_device
from metapretrain.errors import InputError, one_of
from metapretrain.prompts import PromptedModel, SoftPrompt
from metapretrain.prompts.template import SECOND
from metapretrain.tasks.text_saved import read_rows, write_table
from metapretrain.training.files import read_json
from metapretrain.training.weight_sums import check_sums

PROMPTS = "prompts"  # the folder of a run that holds an adapter for each set


def predict_with_prompts(
    run: str | Path, tables: Mapping[str, Path], out: str | Path | None = None, device: str | torch.device = "cpu"
) -> list[Path]:
    """Predict the rows of files with a run's prompts; write `SET.csv` for each and return the paths.

    Args:
        run: the folder of the run; its language model is loaded by the name that the run was given.
        tables: by the set's name, a table with the columns `id` and `sentence`, or `sentence1` and `sentence2`.
        out: where the predictions go; None: `own-texts` in the run's folder.

    Raises:
        InputError: a set that the run has no prompt for, a table or a model that cannot be read.
    """
    from metapretrain.models.language_models import load_language_model

    run = Path(run)
    known = sorted(path.name for path in (run / PROMPTS).iterdir() if path.is_dir())
    try:
        name = (read_json(run / "config.json") or {})["config"]["choices"]["model"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise InputError(f"{run / 'config.json'} names no language model that the prompts are for; is it the run's?")
    for of in tables:
        one_of("set of the run", of, known)
    check_sums(run)
    net, tokenizer = load_language_model(name)
    net = net.to(check_device(str(device)))
    written = []
    for of, file in tables.items():
        model = PromptedModel.load(run / PROMPTS / of, net, tokenizer)
        pairs = SECOND in model.template.text
        rows = read_rows(of, file, "pair-classification" if pairs else "classification")
        prompt = SoftPrompt.from_adapter(run / PROMPTS / of).weight
        predicted = model.classify(prompt, rows.first, rows.second).argmax(1)
        written.append(write_table((run / "own-texts" if out is None else Path(out)) / f"{of}.csv", rows, predicted))
    return written
