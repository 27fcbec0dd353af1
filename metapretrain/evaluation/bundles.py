"""The lines of a bundle: what most of its results have alike, such as checksums of data files, is told once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from metapretrain.errors import InputError

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

    Raises:
        InputError: a line of what is shared is damaged or not the first: it is not known which results share it; or
            it was lost: a result has the commit of its run, but not the versions that every run tells beside it.

    Example:
        >>> unfold([{"shared": {"data": {}}}, {"seed": 0}, {"seed": 1, "data": {"a": {}}}])
        [{'data': {}, 'seed': 0}, {'data': {'a': {}}, 'seed': 1}]
    """
    shared = _shared(lines[0]) if lines else None
    rest = lines if shared is None else lines[1:]
    for number, line in enumerate(rest, start=1 + len(lines) - len(rest)):
        if isinstance(line, dict) and SHARED in line and "schema" not in line:
            raise InputError(
                f'entry {number} has "{SHARED}", which is for the first entry alone, as {{"{SHARED}": {{...}}}}; to '
                "join bundles, put their files into one folder"
            )
    results = [shared | line if shared is not None and isinstance(line, dict) else line for line in rest]
    for number, result in enumerate(results, start=1 + len(lines) - len(rest)):
        if isinstance(result, dict) and "commit" in result and "versions" not in result:
            raise InputError(
                f'entry {number} has a commit but no versions: the first entry, {{"{SHARED}": {{...}}}}, with what '
                "most results share was lost or changed; restore the file"
            )
    return results


def _shared(line: Any) -> dict[str, Any] | None:
    found = line[SHARED] if isinstance(line, dict) and line.keys() == {SHARED} else None
    return found if isinstance(found, dict) else None
