"""The one error that bad input raises, and the check of a name against the allowed ones."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input in one line: what was given, what is allowed, what to do.

    Scripts print it as ``error: <line>`` and exit with status 2; in Python it is a :class:`ValueError`.

    Example:
        >>> raise InputError("seed is -1; give a whole number of at least 0")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: seed is -1; give a whole number of at least 0
    """


def brief(value: object) -> str:
    """A value as an error shows it: its repr, or its type where that is more than a line of 80 characters.

    Example:
        >>> brief(0.5), brief(list(range(1000)))
        ('0.5', 'a list')
    """
    shown = repr(value)
    return shown if len(shown) <= 80 and "\n" not in shown else f"a {type(value).__name__}"


def one_of(what: str, given: str, allowed: Iterable[str]) -> str:
    """Return `given` if it is one of `allowed`.

    Raises InputError: it is not; the line names the nearest valid choice.

    Example:
        >>> one_of("distance", "cosine", ["cosine", "dot"])
        'cosine'
        >>> one_of("distance", "cosin", ["cosine", "dot"])
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: unknown distance 'cosin'; did you mean 'cosine'? allowed: cosine, dot
    """
    names = sorted(allowed)
    if given in names:
        return given
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    shown = repr(given) if isinstance(given, str) else brief(given)
    raise InputError(f"unknown {what} {shown}{hint} allowed: {', '.join(names)}")
