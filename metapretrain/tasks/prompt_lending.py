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

PROMPT = "prompt"  # the folder of a pretraining's weights
TUNING = ("examples", "validation", "stratified", "test_rows", "tune", "full")  # choices that come after pretraining


def check_lent(folder: Path, wanted: Mapping[str, Any], *, all_data: bool) -> None:
    """Refuse a pretraining that other choices or other data made.

    Args:
        folder: of its run.
        wanted: the configuration that it would have here.
        all_data: the downstream sets matter as well: pseudo labels leave out sentences that stand there.

    Raises:
        InputError: a difference; the first one is named with both values. Or a folder that is damaged.
    """
    stored = (read_json(folder / "config.json") or {}).get("config")
    result, now = read_json(folder / "result.json") or {}, plain(wanted)
    if lost := [key for key in ("metrics", "budget", "wall_s") if key not in result]:
        raise InputError(f"{folder / 'result.json'} is damaged: it has no {lost[0]}; give another --pretrained")
    if not (folder / PROMPT).is_dir():
        raise InputError(f"{folder} has no folder {PROMPT}, which its weights are in; give another --pretrained")
    try:
        before, now = _shaping(stored, now, all_data), _shaping(now, stored, all_data)
    except (AttributeError, KeyError, TypeError):
        raise InputError(f"{folder / 'config.json'} is damaged: it has no choices and data of a pretraining") from None
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
    for name in (PROMPT, "figures"):
        if (folder / name).is_dir():
            shutil.copytree(folder / name, place / name, dirs_exist_ok=True)
    for name in ("metrics.jsonl", SUMS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, place / name)
    for name, changes in (("config.json", config), ("result.json", result)):  # the result last: then it is finished
        write_file(place / name, json.dumps({**(read_json(folder / name) or {}), **changes}, indent=1) + "\n")


def _shaping(config: Any, other: Any, all_data: bool) -> dict[str, Any]:
    """What of a configuration a pretrained prompt depends on, flat, with the files that the other one has as well."""
    counts, files = config["data"]["counts"], _files(config)
    kept = {name: config[name] for name in ("method", "seed", "dataset", "precision", "model")}
    kept["choices"] = {key: value for key, value in config["choices"].items() if key not in TUNING}
    kept["counts"] = counts if all_data else {"pretraining": counts["pretraining"]}
    shared = files.keys() & _files(other).keys()
    return {**flatten(kept), **{f"files.{name}": files[name] for name in shared}}


def _files(config: Any) -> dict[str, Any]:
    return {**config["data"].get("files", {}), **config.get("plain", {}).get("files", {})}
