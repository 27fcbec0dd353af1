"""Meta tasks that take long to find, kept on the disk between processes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from metapretrain.training.files import write_file

log = logging.getLogger(__name__)


def kept_groups(folder: Path, texts: Sequence[str], k: int, seed: int, make: Callable[[], Tensor]) -> Tensor:
    """Groups (N,) of LDA as `make` finds them, or as an earlier process did for the same N texts, k and seed.

    They are small files below `folder`, named by a checksum of the texts and of the version of scikit-learn. One that
    is damaged is made anew, with a warning.

    Raises:
        InputError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = kept_groups(Path(folder), ["a", "b"], 2, 0, lambda: torch.tensor([0, 1]))
        ...     kept_groups(Path(folder), ["a", "b"], 2, 0, lambda: torch.tensor([7, 7]))
        tensor([0, 1])
    """
    digest = hashlib.sha256("\0".join([version("scikit-learn"), *texts]).encode()).hexdigest()[:16]
    file = folder / "groups" / f"lda-{k}-seed{seed}-{digest}.txt"
    if file.is_file():
        known = {str(group): group for group in range(k)}
        found = [known.get(word) for word in file.read_text(errors="replace").split()]
        if len(found) == len(texts) and None not in found:
            return torch.tensor(found)
        log.warning("%s is damaged; its groups are found anew", file)
    groups = make()
    write_file(file, " ".join(map(str, groups.tolist())) + "\n")
    return groups
