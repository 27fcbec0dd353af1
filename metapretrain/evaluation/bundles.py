"""The lines of a bundle: what most of its results have alike, such as checksums of data files, is told once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

SHARED = "shared"


def fold(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results without the nested values that most of them have alike; these come first, as `{"shared": {}}`.

    Example:
        >>> data = {"train.bin": {"md5": "0"}}
        >>> fold([{"seed": 0, "data": data}, {"seed": 1, "data": data}])
        [{'shared': {'data': {'train.bin': {'md5': '0'}}}}, {'seed': 0}, {'seed': 1}]
    """
    shared = {}
    for key in sorted(set.intersection(*(set(result) for result in results))) if results else []:
        values = Counter(json.dumps(result[key], sort_keys=True) for result in results)
        value, count = values.most_common(1)[0]
        if 2 * count > max(2, len(results)) and value[0] in "{[":
            shared[key] = value
    folded = [
        {key: value for key, value in one.items() if shared.get(key) != json.dumps(value, sort_keys=True)}
        for one in results
    ]
    return [{SHARED: {key: json.loads(value) for key, value in shared.items()}}] * bool(shared) + folded


def unfold(lines: Sequence[Any]) -> list[Any]:
    """Return the results that :func:`fold` was given; lines of a bundle that shares nothing are returned as they are.

    Example:
        >>> unfold([{"shared": {"data": {}}}, {"seed": 0}, {"seed": 1, "data": {"a": {}}}])
        [{'data': {}, 'seed': 0}, {'data': {'a': {}}, 'seed': 1}]
    """
    first = lines[0] if lines else None
    if not (isinstance(first, dict) and first.keys() == {SHARED} and isinstance(first[SHARED], dict)):
        return list(lines)
    return [first[SHARED] | line if isinstance(line, dict) else line for line in lines[1:]]
