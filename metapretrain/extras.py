"""learn2learn, the optional peer: imported when used, and how to install it."""

from __future__ import annotations

from typing import Any

from metapretrain.errors import InputError

_NEEDS = "pip install gym requests scipy tqdm"
INSTALL = f'pip install --no-deps --config-settings="--build-option=build_ext" learn2learn==0.2.0 && {_NEEDS}'


def import_learn2learn(what: str = "learn2learn") -> Any:
    """The module learn2learn; `what` begins the error's line.

    Raises:
        InputError: it is not installed, or what it imports is not.
    """
    try:
        import learn2learn
    except ImportError as error:
        if error.name not in (None, "learn2learn"):
            raise InputError(f"{what} cannot be imported: {error}; {_NEEDS}") from None
        raise InputError(f"{what} is not installed: {INSTALL} (needs a C compiler)") from None
    return learn2learn
