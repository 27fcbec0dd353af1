"""A run's configuration as flat keys, and what a resume may not change in it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.training.files import plain, read_json


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nest of dicts as one dict with dotted keys.

    Example:
        >>> flatten({"model": {"encoder": "resnet18"}, "seed": 0})
        {'model.encoder': 'resnet18', 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def check_same(run: Path, before: Any, given: Mapping[str, Any], may_change: Collection[str] = ()) -> None:
    """Refuse to continue a run under another configuration.

    Args:
        run: the run folder, for the error.
        before: the configuration stored there, as JSON has it.
        given: the one of now, as JSON has it.
        may_change: dotted keys that may differ.

    Raises:
        InputError: another method, or a changed key; every changed key is named with both values, a whole part that the
                stored configuration lacks by its name.

    Example:
        >>> check_same(Path("runs/a"), {"seed": 0, "lr": 0.1}, {"seed": 0, "lr": 0.2})
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: --resume with a changed configuration in runs/a: lr was 0.1, is 0.2;
        give the same options again or choose another --out
    """
    if not isinstance(before, dict):
        raise InputError(f"{run} has no configuration in its config.json; choose another --out")
    if before.get("method") != given.get("method"):
        raise InputError(
            f"the checkpoint in {run} is from another method: {before.get('method')!r}, given "
            f"{given.get('method')!r}; choose another --out"
        )
    unknown = [key for key, value in given.items() if isinstance(value, Mapping) and key not in before]
    old, new = flatten(before), flatten({key: value for key, value in given.items() if key not in unknown})
    changed = [
        f"{key} was not kept (by an older version?)"
        for key in unknown
        if not flatten({key: given[key]}).keys() <= {*may_change}
    ]
    changed += [
        f"{key} was {_said(old, key)}, is {_said(new, key)}"
        for key in sorted({*old, *new})
        if key not in may_change and _said(old, key) != _said(new, key)
    ]
    if changed:
        raise InputError(
            f"--resume with a changed configuration in {run}: {'; '.join(changed)}; "
            "give the same options again or choose another --out"
        )


def _said(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True) if key in config else "not set"


def check_neighbours(root: Path, given: Mapping[str, Any]) -> None:
    """Refuse to put runs of two recipes, or of two folders of data, into one table.

    Args:
        root: the folder of all runs of the table.
        given: the parts of the configuration that they share, by name.

    Raises:
        InputError: a run there differs in one of them; the run, the first key and both values are named.
    """
    for file in sorted(root.glob("*/config.json")):
        stored = (read_json(file) or {}).get("config")
        if not isinstance(stored, dict) or not given.keys() <= stored.keys():
            continue
        before, now = (flatten(plain({key: config[key] for key in given})) for config in (stored, given))
        key = next((key for key in sorted({*before, *now}) if before.get(key) != now.get(key)), None)
        if key is not None:
            raise InputError(
                f"{file.parent} in the same table has another configuration: {key} was {_said(before, key)}, is "
                f"{_said(now, key)}; give the same options again or choose another --out (or --tag, where there is one)"
            )
