"""What makes the result of a run impossible to use, told in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from reprlib import repr as shortened
from typing import Any, TypeGuard

from metapretrain.evaluation.columns import layout_of

SCHEMA = 1
SETTINGS = ("aware", "agnostic")


def fault_of(result: Mapping[str, Any]) -> str | None:
    """Return what makes a result unusable, or None.

    Args:
        result: the JSON object of a run, of any origin.

    Example:
        >>> good = {"schema": 1, "method": "a", "seed": 0, "metrics": {"test_accuracy": 0.5}}
        >>> print(fault_of(good))
        None
        >>> fault_of(good | {"counts": {"test": -5}})
        'counts.test is -5; it must be a finite number of at least 0'
    """
    if result.get("schema") != SCHEMA:
        return f"schema {shortened(result.get('schema'))}, this version reads {SCHEMA}"
    if not isinstance(result.get("method"), str) or type(result.get("seed")) is not int:
        return "it names no method (text) and seed (whole number)"
    for name in ("wall_s", "pretrain_wall_s"):
        if result.get(name) is not None and not _is_amount(result[name]):
            return _no_amount(name, result[name])
    if not isinstance(result.get("metrics"), dict):
        return "'metrics' must be a JSON object"
    for part in ("counts", "budget"):
        if not isinstance(result.get(part, {}), dict):
            return f"{part!r} must be a JSON object"
        for name, value in result.get(part, {}).items():
            if not _is_amount(value):
                return _no_amount(f"{part}.{name}", value)
    fault = _fault_of_metrics(result["metrics"]) or ("curve" in result and _fault_of_curve(result))
    if fault:
        return fault
    if result.get("kind") == "tuning":
        return "a tuning run: it has no test figures"
    layout = layout_of(str(result.get("benchmark") or ""), result["metrics"])
    main = layout.column(layout.main)
    enough = {main.metric, *(layout.column(part).metric for part in main.parts)}  # a row may have some tasks only
    if result.get("kind") != "pretraining" and all(result["metrics"].get(metric) is None for metric in enough):
        return f"metrics.{main.metric} is missing"
    return None


def is_finite(value: Any) -> TypeGuard[float]:
    """Tell whether a value of JSON is a number that can be computed with.

    Example:
        >>> [is_finite(value) for value in (1, 0.5, True, "1", None, float("nan"), 10**400)]
        [True, True, False, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 and math.isfinite(value)


def _is_amount(value: Any) -> bool:
    return is_finite(value) and value >= 0


def _no_amount(name: str, value: Any) -> str:
    return f"{name} is {shortened(value)}; it must be a finite number of at least 0"


def _fault_of_metrics(metrics: Mapping[str, Any]) -> str | None:
    for name, value in metrics.items():
        if value is None:
            continue
        if not is_finite(value):
            return f"metrics.{name} is {shortened(value)}, not a finite number"
        if name.endswith(("accuracy", "_f1")) and not 0 <= value <= 1:
            return f"metrics.{name} is {value!r}; accuracies are fractions, 0 to 1"
        if name.endswith(("_pearson", "_spearman")) and not -1 <= value <= 1:
            return f"metrics.{name} is {value!r}; correlations lie in -1 to 1"
    return None


def _fault_of_curve(result: Mapping[str, Any]) -> str | None:
    """The curve of a scheduling run: lists of one length; only a loss that was not finite may be null."""
    curve = result["curve"]
    needed = ("updates", "compute_units", "target_loss")
    if not isinstance(curve, dict):
        return f"'curve' is {shortened(curve)}; it must be a JSON object"
    if result.get("setting") not in SETTINGS:
        return f"'setting' is {shortened(result.get('setting'))}; a run with a curve has {' or '.join(SETTINGS)}"
    for name in (*needed, *curve):
        values = curve.get(name)
        if not isinstance(values, list):
            return f"curve.{name} is {shortened(values)}; it must be a list of numbers"
        if len(values) != len(curve["updates"]):
            return f"curve.{name} has {len(values)} numbers, curve.updates {len(curve['updates'])}"
        for place, value in enumerate(values):
            if name == "target_loss":
                if value is not None and not is_finite(value):
                    return f"curve.{name}[{place}] is {shortened(value)}; it must be a finite number or null"
            elif not _is_amount(value):
                return _no_amount(f"curve.{name}[{place}]", value)
        if name in needed[:2] and any(after <= before for before, after in pairwise(values)):
            return f"curve.{name} must rise from each evaluation to the next"
    return None
