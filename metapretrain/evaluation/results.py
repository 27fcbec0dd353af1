"""Read the results of many runs, from their folders or from a compact bundle, and say what cannot be used."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metapretrain.errors import InputError
from metapretrain.evaluation.bundles import fold, unfold
from metapretrain.evaluation.faults import fault_of
from metapretrain.evaluation.layout import Result as Result
from metapretrain.evaluation.predictions import read_predictions
from metapretrain.training.files import write_file

log = logging.getLogger(__name__)
EXPECTED = "a folder of runs (<method>-s<seed>/result.json at any depth) or of bundles (<name>.json)"


@dataclass(frozen=True)
class Collection:
    """Results that can be compared, the runs that are not complete and the files that are no good."""

    results: list[Result] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(root: Path | str) -> Collection:
    """Read every result under `root`.

    A complete run's `predictions.csv`, if it has one, becomes the result's "correct" entry (see `pack`); a
    bundle holds that entry already. Nothing is skipped in silence: runs without a result, or whose status is
    not "complete", are in `.incomplete`, and unreadable, impossible or repeated results in `.problems`.

    Args:
        root: a folder of runs, a folder of bundles, or one bundle.

    Raises:
        InputError: `root` does not exist, is a file that is no bundle, or holds nothing of the kind.
    """
    root = Path(root)
    if root.is_file():
        return _sift([(root.name, result) for result in _read_bundle(root)], [], [])
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; expected {EXPECTED}")
    candidates: list[tuple[str, Result]] = []
    incomplete: list[str] = []
    problems: list[str] = []
    folders = {path.parent for name in ("result.json", "config.json") for path in root.rglob(name)}
    for folder in sorted(folders):
        if not folders.isdisjoint(folder.parents):  # a saved encoder's folder inside a run has a config.json too
            continue
        name = folder.relative_to(root).as_posix()
        if not (folder / "result.json").is_file():
            incomplete.append(f"{name} (no result.json)")
            continue
        try:
            candidates.append((name, _read_run(folder, problems, name)))
        except InputError as error:
            problems.append(str(error))
    for path in sorted(root.glob("*.json")):
        if path.name not in ("result.json", "config.json"):
            try:
                candidates += [(path.name, result) for result in _read_bundle(path, among_others=True)]
            except InputError as error:
                problems.append(str(error))
    if not (candidates or incomplete or problems):
        raise InputError(f"no results in {root}; expected {EXPECTED}")
    return _sift(candidates, incomplete, problems)


def _read_json(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON (torn or damaged): {error}") from error


def _read_bundle(path: Path, among_others: bool = False) -> list[Result]:
    content = _read_json(path, path.name)
    try:
        listed = unfold(content) if isinstance(content, list) else []
    except InputError as error:
        raise InputError(f"{path.name}: not a bundle: {error}") from error
    if not any(isinstance(result, dict) and "schema" in result for result in listed):
        if among_others:  # figures of another kind, such as speeds, may stand beside the bundles
            log.info("%s holds no results of runs: left out", path.name)
            return []
        raise InputError(f"{path.name}: not a bundle (a JSON list of results); expected {EXPECTED}")
    if not all(isinstance(result, dict) for result in listed):
        raise InputError(f"{path.name}: not a bundle (a JSON list of results); expected {EXPECTED}")
    return listed


def _read_run(folder: Path, problems: list[str], name: str) -> Result:
    result = _read_json(folder / "result.json", f"{name}/result.json")
    if not isinstance(result, dict):
        raise InputError(f"{name}/result.json: not a result: a JSON object was expected")
    if (folder / "predictions.csv").is_file():
        try:
            predictions = read_predictions(folder / "predictions.csv")
        except InputError as error:
            problems.append(f"{name}: no comparison image by image: {str(error).replace(f'{folder}/', '')}")
        else:
            result["correct"] = pack(predictions.correct, predictions.images)
    return result


def pack(correct: NDArray[np.bool_], images: str) -> dict[str, Any]:
    """Right or wrong for each image, as JSON: {"n", "bits": base64 of packed bits, "images": fingerprint}.

    Example:
        >>> unpack(pack(np.array([True, False, True]), "a")).tolist()
        [True, False, True]
    """
    bits = base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")
    return {"n": int(correct.size), "bits": bits, "images": images}


def unpack(packed: Mapping[str, Any]) -> NDArray[np.bool_]:
    """The inverse of `pack`: bool (n,).

    Raises:
        InputError: the entry does not hold `n` bits.
    """
    try:
        n, content = int(packed["n"]), base64.b64decode(packed["bits"], validate=True)
        if n < 1 or len(content) != (n + 7) // 8:
            raise ValueError(f"{len(content)} bytes for {n} images")
        if not isinstance(packed.get("images", ""), str):
            raise ValueError("its images are no fingerprint")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(f"'correct' is damaged: {error}") from error
    return np.unpackbits(np.frombuffer(content, np.uint8), count=n).astype(bool)


def bundle(results: Iterable[Mapping[str, Any]], path: Path | str) -> Path:
    """Write results to one small file, a line each, from which `collect` gives the same results.

    What most of them have alike, such as the checksums of data files, is told once, in the first line.

    Args:
        results: as in `Collection.results`.
        path: usually `docs/results/<name>.json`.

    Raises:
        InputError: there are no results, one holds NaN or infinity, or the file cannot be written.
    """
    try:
        lines = [json.dumps(line, sort_keys=True, allow_nan=False) for line in fold(list(results))]
    except ValueError as error:
        raise InputError(f"cannot bundle into {path}: a result holds NaN or infinity, which JSON has not") from error
    if not lines:
        raise InputError(f"no complete result to bundle into {path}")
    return write_file(Path(path), "[\n" + ",\n".join(lines) + "\n]\n")


def _disagreement(result: Result) -> str | None:
    """Why the per-image part cannot belong to the result's own figures, or None."""
    try:
        correct = unpack(result["correct"])
    except InputError as error:
        return str(error)
    stated = result["metrics"].get("test_accuracy")
    if stated is not None and abs(float(correct.mean()) - stated) > 0.5 / correct.size:
        return f"the predictions are right for {correct.mean():.4f} of the images, test_accuracy is {stated:.4f}"
    count = result.get("counts", {}).get("test")
    if count is not None and count != correct.size:
        return f"{correct.size} predictions for {count} test images"
    return None


def data_of(result: Mapping[str, Any], own: bool = False) -> tuple[tuple[str, str], ...]:
    """The files that a run read with their checksums, where the result tells them.

    Args:
        result: of the run.
        own: those that some rows of a table read by themselves (marked `only`), in place of those that all read.

    Example:
        >>> data_of({"data": {"test_X.bin": {"bytes": 3, "md5": "900150983cd24fb0"}}})
        (('test_X.bin', '900150983cd24fb0'),)
    """
    files = result.get("data")
    if not isinstance(files, dict):
        return ()
    records = {name: file for name, file in files.items() if isinstance(file, dict) and ("only" in file) == own}
    return tuple(sorted((name, str(file.get("md5"))) for name, file in records.items()))


def identity(result: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """What tells one run from another: benchmark, dataset, recipe, encoder, kind and method; and the seed."""
    keys = ("benchmark", "dataset", "recipe", "encoder", "kind", "method")
    return tuple(str(result.get(key) or "") for key in keys), int(result["seed"])


def _sift(candidates: Sequence[tuple[str, Result]], incomplete: list[str], problems: list[str]) -> Collection:
    found: dict[tuple[tuple[str, ...], int], tuple[str, Result]] = {}
    for name, result in candidates:
        status = result.get("status")
        if status != "complete":
            incomplete.append(f"{name} (status {status!r})")
            continue
        fault = fault_of(result)
        if fault is not None:
            problems.append(f"{name}: {fault}")
            continue
        if "correct" in result:
            disagreement = _disagreement(result)
            if disagreement is not None:
                problems.append(f"{name}: no comparison image by image: {disagreement}")
                result = {key: value for key, value in result.items() if key != "correct"}
        key = identity(result)
        if key not in found:
            found[key] = (name, result)
        elif found[key][1] != result:
            problems.append(f"{name}: left out, {found[key][0]} is the same method and seed with other figures")
    results = [found[key][1] for key in sorted(found)]
    return Collection(results, incomplete, problems)
