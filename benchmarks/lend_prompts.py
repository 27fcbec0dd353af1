"""Prompts that another table pretrained, copied where nothing differs that a pretraining depends on."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prompts_experiment import PROMPT, PromptContext, PromptExperiment

from metapretrain.errors import InputError
from metapretrain.experiments.prompts.recipe import PromptMethod
from metapretrain.files import check_sums, plain, read_json, write_file, write_sums
from metapretrain.training.settings import flatten

log = logging.getLogger("metapretrain.lend_prompts")
TUNING = ("examples", "validation", "stratified", "test_rows", "tune", "full")  # choices that come after pretraining


def check_lent(folder: Path, wanted: Mapping[str, Any], *, all_data: bool) -> None:
    """Refuse the pretraining in `folder` if other choices than those `wanted` here, or other data, made it.

    With `all_data` the downstream sets matter as well: pseudo labels leave out sentences that stand there.
    InputError: a difference; the first one is named with both values. Or a folder that is damaged.
    """
    check_sums(folder)
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
    """Copy a finished pretraining to `place`, with what is given changed in its configuration and result.

    InputError: its prompt is damaged.
    """
    check_sums(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name in (PROMPT, "figures"):
        if (folder / name).is_dir():
            shutil.copytree(folder / name, place / name, dirs_exist_ok=True)
    if (folder / "metrics.jsonl").is_file():
        shutil.copyfile(folder / "metrics.jsonl", place / "metrics.jsonl")
    for name, changes in (("config.json", config), ("result.json", result)):  # the result last: then it is finished
        write_file(place / name, json.dumps({**(read_json(folder / name) or {}), **changes}, indent=1) + "\n")
        write_sums(place)


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


@dataclass(frozen=True)
class LendingExperiment(PromptExperiment):
    """A prompts experiment that takes pretrained prompts of the table in the folder `lender` where they are of the same
    choices and data."""

    lender: Path | None = None

    def check(self, methods: Mapping[str, PromptMethod], seeds: Sequence[int]) -> None:
        """Refuse what :meth:`Experiment.check` does, and pretrained prompts of another table that do not fit."""
        super().check(methods, seeds)
        if self.lender is not None and not self.lender.is_dir():
            raise InputError(f"no folder {self.lender} to take pretrained prompts from")
        plans = filter(None, map(self.pretraining_run, methods.values()))
        lent = [self._lent(*plan, seed) for plan in plans for seed in seeds]
        if self.lender is not None and lent and not any(lent):
            log.warning("%s has no pretraining of these rows and seeds: all is trained here", self.lender)

    def work(self, methods: Mapping[str, PromptMethod], seeds: Sequence[int]) -> Iterator[list[PromptContext]]:
        """Yield batches of runs; a pretraining that another table lends is copied, and left out."""
        for batch in super().work(methods, seeds):
            if batch[0].shared:
                batch = [one for one in batch if not self._borrowed(one)]
            if batch:
                yield batch

    def _borrowed(self, context: PromptContext) -> bool:
        name, method, seed = context.name, context.method, context.seed
        if (folder := self._lent(name, method, seed)) is None:
            return False
        own = {"config": plain(self.whole_config(name, method, seed))}
        named = {**self.names, "counts": self.data.counts, "data": self.files_of(method)}
        with self.open(name, method, seed) as run:
            take_over(folder, run.path, own, named)
        log.info("%s: the prompt of %s", run.path.name, folder)
        return True

    def _lent(self, name: str, method: PromptMethod, seed: int) -> Path | None:
        """The folder of a finished pretraining of the other table, if any; InputError if it is of other choices."""
        if self.lender is None or not (folder := self.lender / f"{name}-s{seed}").joinpath("result.json").is_file():
            return None
        check_lent(folder, self.whole_config(name, method, seed), all_data=method.source == "pseudo")
        return folder
