"""Which inner step is being computed, for modules that keep something for each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_step: ContextVar[int] = ContextVar("inner step", default=0)
_repeated: ContextVar[bool] = ContextVar("inner step computed again", default=False)


def current_step() -> int:
    """Number of inner steps that the parameters in use have taken: 0 outside, `steps` for the query loss.

    Example:
        >>> current_step()
        0
    """
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
