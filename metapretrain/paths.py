"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(name: str | Path) -> Path:
    """The path with ``~`` as the user's home; an unknown user's stays as it is, for the error that follows to name.

    Example:
        >>> user_path("~/data") == Path.home() / "data", str(user_path("~no-such-user-here/data"))
        (True, '~no-such-user-here/data')
    """
    return Path(os.path.expanduser(name))
