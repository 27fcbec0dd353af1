"""The results of many runs, from their folders or from a compact bundle, and what cannot be used."""

import base64
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import main_scores
from metapretrain.evaluation.predictions import SAME, contradiction, read_predictions, recounted
from metapretrain.files import write_file
from metapretrain.report.layout import FILE, Layout, Result

SCHEMA = 1
ABSENT: Result = {"counts": {}, "budget": {}, "benchmark": "", "dataset": "", "recipe": "", "command": ""}


def fault_of(result: Mapping[str, Any], layout: Layout | None = None) -> str | None:
    """Return what makes the JSON object of a run unusable, or None; its layout names the main figure.

    Example:
        >>> good = {"schema": 1, "method": "a", "seed": 0, "metrics": {"test_accuracy": 0.5}}
        >>> fault_of(good | {"counts": {"test": -5}})
        'counts.test is -5; it must be a finite number of at least 0'
    """
    if result.get("schema") != SCHEMA:
        return f"schema {shortened(result.get('schema'))}, this version reads {SCHEMA}"
    if not isinstance(result.get("method"), str) or type(result.get("seed")) is not int:
        return "it names no method (text) and seed (whole number)"
    if not isinstance(result.get("metrics"), dict):
        return "'metrics' must be a JSON object"
    parts = {**ABSENT, **result}
    if wrong := [name for name, value in ABSENT.items() if not isinstance(parts[name], type(value))]:
        return f"{wrong[0]!r} must be {'text' if ABSENT[wrong[0]] == '' else 'a JSON object'}"
    amounts = {name: result[name] for name in ("wall_s", "pretrain_wall_s") if result.get(name) is not None}
    amounts |= {f"{part}.{name}": value for part in ("counts", "budget") for name, value in parts[part].items()}
    faults = [_no_amount(name, value) for name, value in amounts.items()]
    faults += [_fault_of_metrics(result["metrics"]), _fault_of_curve(result) if "curve" in result else None]
    if fault := next(filter(None, faults), None):
        return fault
    if "correct" in result and (fault := _fault_of_predictions(result)):
        return fault
    if result.get("kind") == "tuning":
        return "a tuning run: it has no test numbers"
    if result.get("kind") == "pretraining":
        return None
    known = {name for name, value in result["metrics"].items() if value is not None}
    if layout is None:
        return None if known else "it has no number"
    layout = layout.measured(result["metrics"])
    main = layout.column(layout.main)  # of its parts a row may have some only
    enough = {main.metric, *(layout.column(part).metric for part in main.parts)}
    return _fault_of_means(result["metrics"], layout) if known & enough else f"metrics.{main.metric} is missing"


def _fault_of_means(metrics: Mapping[str, Any], layout: Layout) -> str | None:
    """A mean that is not that of its parts, where a row has them all."""
    names = {column.name for column in layout.columns}
    if layout.open and not main_scores(dict.fromkeys(metrics, 0.0)).keys() <= names:
        return None  # it means over tasks that this layout does not know
    for column in layout.all_columns:
        wanted = [column.metric, *(layout.column(part).metric for part in column.parts)]
        known = [float(metrics[name]) for name in wanted if metrics.get(name) is not None]
        if column.parts and len(known) == len(wanted) and abs(np.mean(known[1:]) - known[0]) > SAME:
            told = f"metrics.{column.metric} is {known[0]:.6g}, but its parts mean {np.mean(known[1:]):.6g}"
            return f"{told}: left out; restore the file that was changed, or run it again"
    return None


def _fault_of_predictions(result: Mapping[str, Any]) -> str | None:
    """An accuracy that is not that of the predictions; those of a pretraining are of the nearest prototype."""
    try:
        correct = unpack(result["correct"])
    except InputError:  # which leaves the figures as they are
        return None
    metric = "nearest_prototype_accuracy" if result.get("kind") == "pretraining" else "test_accuracy"
    stated, counted = result["metrics"].get(metric), float(correct.mean())
    same = stated is None or abs(counted - stated) <= SAME
    return None if same else contradiction(metric, stated, counted, "predictions.csv", correct.size)


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a number that can be computed with: no text, NaN or 10**400."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _no_amount(name: str, value: Any) -> str | None:
    if is_finite(value) and value >= 0:
        return None
    return f"{name} is {shortened(value)}; it must be a finite number of at least 0"


def _fault_of_metrics(metrics: Mapping[str, Any]) -> str | None:
    for name, value in metrics.items():
        if value is not None and not is_finite(value):
            return f"metrics.{name} is {shortened(value)}, not a finite number"
        if value is not None and name.endswith(("accuracy", "_f1")) and not 0 <= value <= 1:
            return f"metrics.{name} is {value!r}; accuracies are fractions, 0 to 1"
        if value is not None and name.endswith(("_pearson", "_spearman")) and not -1 <= value <= 1:
            return f"metrics.{name} is {value!r}; correlations lie in -1 to 1"
    return None


def _fault_of_curve(result: Mapping[str, Any]) -> str | None:
    """The curve of a scheduling run: lists of one length; only a loss that was not finite may be null."""
    curve = result["curve"]
    needed = ("updates", "compute_units", "target_loss")
    if not isinstance(curve, dict):
        return f"'curve' is {shortened(curve)}; it must be a JSON object"
    setting = result.get("setting")
    if not isinstance(setting, str) or re.fullmatch(r"[\w-]*", setting) is None:  # a figure's file is named by it
        return f"'setting' is {shortened(setting)}; it must be a word"
    for name in (*needed, *curve):
        values = curve.get(name)
        if not isinstance(values, list):
            return f"curve.{name} is {shortened(values)}; it must be a list of numbers"
        if len(values) != len(curve["updates"]):
            return f"curve.{name} has {len(values)} numbers, curve.updates {len(curve['updates'])}"
        for place, value in enumerate(values):
            if name != "target_loss" and (fault := _no_amount(f"curve.{name}[{place}]", value)):
                return fault
            if value is not None and not is_finite(value):
                return f"curve.{name}[{place}] is {shortened(value)}; it must be a finite number or null"
        if name in needed[:2] and any(after <= before for before, after in pairwise(values)):
            return f"curve.{name} must rise from each evaluation to the next"
    return None


SHARED = "shared"


def fold(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results without the nested values that most of them have alike, which the first entry tells."""
    shared = {}
    for key in sorted(set.intersection(*(set(result) for result in results))) if results else []:
        values = Counter(json.dumps(result[key], sort_keys=True) for result in results)
        value, count = values.most_common(1)[0]
        if 2 * count > max(2, len(results)) and value[0] in "{[":
            shared[key] = value
    first = {SHARED: {key: json.loads(value) for key, value in shared.items()}}
    own = [{k: v for k, v in one.items() if shared.get(k) != json.dumps(v, sort_keys=True)} for one in results]
    return [first] * bool(shared) + own


def unfold(lines: Sequence[Any]) -> list[Any]:
    """Return the results that `fold` was given; those of a bundle that shares nothing are returned as they are.

    Raises InputError: what is shared is damaged, lost or not the first line, so that it is not known which have it.

    Example:
        >>> unfold([{"shared": {"data": {}}}, {"seed": 0}, {"seed": 1, "data": {"a": {}}}])
        [{'data': {}, 'seed': 0}, {'data': {'a': {}}, 'seed': 1}]
    """
    shared = None
    if lines and isinstance(lines[0], dict) and lines[0].keys() == {SHARED} and isinstance(lines[0][SHARED], dict):
        shared = lines[0][SHARED]
    results = []
    for number, line in enumerate(lines if shared is None else lines[1:], start=1 + (shared is not None)):
        line = (shared or {}) | line if isinstance(line, dict) else line
        if isinstance(line, dict) and SHARED in line and "schema" not in lines[number - 1]:
            told = f'entry {number} has "{SHARED}", which is for the first entry alone, as {{"{SHARED}": {{...}}}}'
            raise InputError(f"{told}; to join bundles, put their files into one folder")
        if isinstance(line, dict) and "commit" in line and "versions" not in line:
            told = f'entry {number} has a commit but no versions: the first entry, {{"{SHARED}": {{...}}}}, with what'
            raise InputError(f"{told} most results share was lost or changed; restore the file")
        results.append(line)
    return results


log = logging.getLogger(__name__)
EXPECTED = "a folder of runs (<method>-s<seed>/result.json at any depth) or of bundles (<name>.json)"


@dataclass(frozen=True)
class Collection:
    """Results that can be compared, the runs that are not complete and the files that are no good."""

    results: list[Result] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(root: Path | str) -> Collection:
    """Read every result under `root`: a folder of runs, a folder of bundles, or one bundle.

    A run's `predictions.csv` becomes the result's "correct" (see `pack`), the `report/layout.json` beside it "layout".
    Raises InputError: `root` does not exist, is a file that is no bundle, or holds nothing of the kind.
    """
    root = Path(root)
    if root.is_file():
        return _sift([(root.name, result) for result in _read_bundle(root)], [], [])
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; expected {EXPECTED}")
    candidates: list[tuple[str, Result]] = []
    layouts: dict[Path, Any] = {}
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
            if (layout := _layout_beside(folder, layouts, problems)) is not None:
                candidates[-1][1]["layout"] = layout
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
    found = any(isinstance(result, dict) and "schema" in result for result in listed)
    if among_others and not found:  # figures of another kind, such as speeds, may stand beside the bundles
        log.info("%s holds no results of runs: left out", path.name)
        return []
    if not found or not all(isinstance(result, dict) for result in listed):
        raise InputError(f"{path.name}: not a bundle (a JSON list of results); expected {EXPECTED}")
    return listed


def _read_run(folder: Path, problems: list[str], name: str) -> Result:
    result = _read_json(folder / "result.json", f"{name}/result.json")
    if not isinstance(result, dict):
        raise InputError(f"{name}/result.json: not a result: a JSON object was expected")
    if (folder / "config.json").is_file():
        try:
            _read_json(folder / "config.json", f"{name}/config.json")
        except InputError as error:
            problems.append(str(error))
    if (folder / "predictions.csv").is_file():
        try:
            predictions = read_predictions(folder / "predictions.csv")
        except InputError as error:
            problems.append(f"{name}: no comparison image by image: {str(error).replace(f'{folder}/', '')}")
        else:
            result["correct"] = pack(predictions.correct, predictions.images)
    complete = result.get("status") == "complete" and isinstance(result.get("metrics"), dict)
    for file in sorted(folder.glob("predictions/*.csv")) if complete else ():
        try:
            fault = recounted(file, result["metrics"])
        except InputError as error:
            problems.append(f"{name}: {str(error).replace(f'{folder}/', '')}")
        else:
            if fault:
                raise InputError(f"{name}: {fault}")
    return result


def _layout_beside(folder: Path, known: dict[Path, Any], problems: list[str]) -> Any:
    """What `report/layout.json` beside a run holds, read once a table, or None."""
    file = folder.resolve().parent / FILE
    if file not in known:
        known[file] = None
        try:
            known[file] = _read_json(file, f"{file.parents[1].name}/{FILE.as_posix()}") if file.is_file() else None
        except InputError as error:
            problems.append(str(error))
    return known[file]


def pack(correct: NDArray[np.bool_], images: str) -> dict[str, Any]:
    """Right or wrong for each image, as JSON: {"n", "bits": base64 of packed bits, "images": fingerprint}."""
    bits = base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")
    return {"n": int(correct.size), "bits": bits, "images": images}


def unpack(packed: Mapping[str, Any]) -> NDArray[np.bool_]:
    """The inverse of `pack`: bool (n,).

    Raises InputError: the entry does not hold `n` bits.
    """
    try:
        n, content = int(packed["n"]), base64.b64decode(packed["bits"], validate=True)
        if n < 1 or len(content) != (n + 7) // 8 or not isinstance(packed.get("images", ""), str):
            raise ValueError(f"{len(content)} bytes for {n} images {packed.get('images', '')!r}")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(f"'correct' is damaged: {error}") from error
    return np.unpackbits(np.frombuffer(content, np.uint8), count=n).astype(bool)


def bundle(results: Iterable[Mapping[str, Any]], path: Path | str) -> Path:
    """Write results as in `Collection.results` to one small file, from which `collect` gives the same ones.

    Raises InputError: there are no results, one holds NaN or infinity, or the file cannot be written.
    """
    try:
        lines = [json.dumps(line, sort_keys=True, allow_nan=False) for line in fold(list(results))]
    except ValueError as error:
        raise InputError(f"cannot bundle into {path}: a result holds NaN or infinity, which JSON has not") from error
    if not lines:
        raise InputError(f"no complete result to bundle into {path}")
    return write_file(Path(path), "[\n" + ",\n".join(lines) + "\n]\n")


def _disagreement(result: Result) -> str | None:
    """Why the per-image part cannot belong to the result, or None."""
    try:
        size = unpack(result["correct"]).size
    except InputError as error:
        return str(error)
    count = result.get("counts", {}).get("test")
    return None if count in (None, size) else f"{size} predictions for {count} test images"


def data_of(result: Mapping[str, Any], own: bool = False) -> tuple[tuple[str, str], ...]:
    """The files with their checksums that all rows of a table read, or (`own`) that this one read by itself.

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
    """What tells one run from another, and the seed."""
    keys = ("benchmark", "dataset", "recipe", "encoder", "kind", "method")
    return tuple(str(result.get(key) or "") for key in keys), int(result["seed"])


def _without(name: str, result: Result) -> Result:
    return {key: value for key, value in result.items() if key != name}


def _sift(candidates: Sequence[tuple[str, Result]], incomplete: list[str], problems: list[str]) -> Collection:
    found: dict[tuple[tuple[str, ...], int], tuple[str, Result]] = {}
    layouts: dict[int, Layout | None] = {id(None): None}
    for name, result in candidates:
        status = result.get("status")
        if status != "complete":
            incomplete.append(f"{name} (status {status!r})")
            continue
        layout = result.get("layout")
        if id(layout) not in layouts:  # most results share one
            layouts[id(layout)] = None
            try:
                layouts[id(layout)] = Layout.from_json(layout)
            except InputError as error:
                problems.append(f"{name}: a general layout is used: {error}")
        known = layouts[id(layout)]
        if known is None and layout is not None:
            result = _without("layout", result)
        if (fault := fault_of(result, known)) is not None:
            problems.append(f"{name}: {fault}")
            continue
        if "correct" in result and (disagreement := _disagreement(result)) is not None:
            problems.append(f"{name}: no comparison image by image: {disagreement}")
            result = _without("correct", result)
        first, kept = found.setdefault(identity(result), (name, result))
        if kept is not result and _without("layout", kept) != _without("layout", result):
            problems.append(f"{name}: left out, {first} is the same method and seed with other numbers")
    results = [found[key][1] for key in sorted(found)]
    return Collection(results, incomplete, problems)
