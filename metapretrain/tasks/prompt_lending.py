"""Pretrained prompts of one table that serve in another, which differs in nothing that a pretraining reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.training.configuration import flatten
from metapretrain.training.files import plain, read_json, write_file
from metapretrain.training.weight_sums import SUMS, check_sums

TUNING = ("examples", "validation", "stratified", "test_rows", "tune", "full")  # choices that come after pretraining


def check_lent(folder: Path, wanted: Mapping[str, Any], *, all_data: bool) -> None:
    """Refuse a pretraining that other choices or other data made.

    Args:
        folder: of its run.
        wanted: the configuration that it would have here.
        all_data: the downstream sets matter as well: pseudo labels leave out sentences that stand there.

    Raises:
        InputError: a difference; the first one is named with both values.
    """
    stored = (read_json(folder / "config.json") or {}).get("config")
    if not isinstance(stored, dict):
        raise InputError(f"{folder} has no configuration in its config.json")
    before, now = _shaping(stored, all_data), _shaping(plain(wanted), all_data)
    files = [config.get("data", {}).get("files", {}) for config in (stored, plain(wanted))]
    for name in files[0].keys() & files[1].keys():
        before[f"files.{name}"], now[f"files.{name}"] = (own[name] for own in files)
    key = next((key for key in sorted({*before, *now}) if before.get(key) != now.get(key)), None)
    if key is not None:
        raise InputError(
            f"{folder} was pretrained in another way: {key} was {before.get(key)!r}, is {now.get(key)!r}; give the "
            "same options as there, or no --pretrained"
        )


def take_over(folder: Path, place: Path, config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Copy a finished pretraining to `place`; its configuration and result are those of there but for what is given.

    Raises:
        InputError: its prompt is damaged.
    """
    check_sums(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name in ("prompt", "figures"):
        if (folder / name).is_dir():
            shutil.copytree(folder / name, place / name, dirs_exist_ok=True)
    for name in ("metrics.jsonl", SUMS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, place / name)
    for name, changes in (("config.json", config), ("result.json", result)):  # the result last: then it is finished
        write_file(place / name, json.dumps({**(read_json(folder / name) or {}), **changes}, indent=1) + "\n")


def _shaping(config: Mapping[str, Any], all_data: bool) -> dict[str, Any]:
    """What of a configuration a pretrained prompt depends on, flat, but for the files."""
    counts = config.get("data", {}).get("counts", {})
    kept = {name: config.get(name) for name in ("dataset", "precision", "model")}
    kept["choices"] = {key: value for key, value in config.get("choices", {}).items() if key not in TUNING}
    kept["counts"] = counts if all_data else {"pretraining": counts.get("pretraining")}
    return flatten(kept)
