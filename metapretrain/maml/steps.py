"""Which inner step is being computed, for modules that keep something for each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from metapretrain.errors import InputError

_step: ContextVar[int] = ContextVar("inner step", default=0)
_repeated: ContextVar[bool] = ContextVar("inner step computed again", default=False)
_any: ContextVar[bool] = ContextVar("recorded for all inner steps", default=False)


def current_step() -> int:
    """Number of inner steps that the parameters in use have taken: 0 outside, `steps` for the query loss.

    Raises:
        InputError: inside :func:`any_step`.

    Example:
        >>> current_step()
        0
    """
    if _any.get():
        raise InputError("a module asks for current_step(): its steps differ and cannot be compiled; leave compile out")
    return _step.get()


def is_repeated() -> bool:
    """Whether the step is computed a second time, by checkpointing or a probe: record nothing then."""
    return _repeated.get()


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Let :func:`current_step` be `step` inside the block."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


@contextmanager
def repeated() -> Iterator[None]:
    """Let :func:`is_repeated` be true inside the block."""
    token = _repeated.set(True)
    try:
        yield
    finally:
        _repeated.reset(token)


@contextmanager
def any_step() -> Iterator[None]:
    """Let :func:`current_step` be an error inside the block, whose computation has to serve for all steps."""
    token = _any.set(True)
    try:
        yield
    finally:
        _any.reset(token)
