"""Which inner step is being computed, for modules that keep something for each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from metapretrain.errors import InputError

V = TypeVar("V")
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
def holding(variable: ContextVar[V], value: V) -> Iterator[None]:
    """Let a context variable have a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def at_step(step: int) -> AbstractContextManager[None]:
    """Let :func:`current_step` be `step` inside the block."""
    return holding(_step, step)


def repeated() -> AbstractContextManager[None]:
    """Let :func:`is_repeated` be true inside the block."""
    return holding(_repeated, True)


def any_step() -> AbstractContextManager[None]:
    """Let :func:`current_step` be an error inside the block, whose computation has to serve for all steps."""
    return holding(_any, True)
