"""Whether a stream can go on from a saved state: the same stream, and a place that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metapretrain.episodes.checks import whole
from metapretrain.errors import InputError


def check_stream_state(state: Any, here: Mapping[str, Any], lengths: Mapping[str, int | None]) -> None:
    """Raise InputError unless `state` is of a stream as the one whose own state is `here`.

    Args:
        lengths: batches in a pass over each task's loader, None where that is unknown.

    Example:
        >>> here = {"seed": 0, "policy": "longest", "scheduler": None, "step": 0, "done": 0, "tasks": {}}
        >>> check_stream_state({}, here, {})
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: the stream's state lacks seed, ...; give what state_dict returned
    """
    _check_keys("the stream's state", state, here)
    for what in ("seed", "policy"):
        if state[what] != here[what]:
            raise InputError(f"the stream's state is of {what} {state[what]!r}, this stream has {here[what]!r}")
    tasks, own = state["tasks"], here["tasks"]
    if not isinstance(tasks, Mapping) or set(tasks) != set(own):
        given = ", ".join(sorted(map(str, tasks))) if isinstance(tasks, Mapping) else repr(tasks)
        raise InputError(f"the stream's state is of tasks {given}; this stream has {', '.join(sorted(own))}")
    for what in ("step", "done"):
        whole(f"{what} of the stream's state", state[what])
    for name, task in tasks.items():
        _check_keys(f"task {name!r} of the stream's state", task, own[name])
        for what in own[name]:
            whole(f"{what} of task {name!r} of the stream's state", task[what])
        if (length := lengths[name]) is not None and task["position"] > length:
            raise InputError(
                f"the stream's state is at batch {task['position']} of task {name!r}, whose loader has {length};"
                " give the loaders that the state was saved with"
            )


def _check_keys(what: str, given: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise InputError(f"{what} is {given!r}; give what state_dict returned")
    if missing := [key for key in wanted if key not in given]:
        raise InputError(f"{what} lacks {', '.join(missing)}; give what state_dict returned")
