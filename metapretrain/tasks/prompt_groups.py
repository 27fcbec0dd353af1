"""Meta tasks that take long to find, kept on the disk between processes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metapretrain.training.files import write_file

log = logging.getLogger(__name__)


def kept_groups(folder: Path, texts: Sequence[str], k: int, seed: int, make: Callable[[], Tensor]) -> Tensor:
    """Groups (N,) of LDA as `make` finds them, or as an earlier process did for the same N texts, k and seed.

    They are small files below `folder`, named by a checksum of the texts and by the version of scikit-learn.

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
        found = np.array(file.read_text().split())
        if len(found) == len(texts) and all(one.isdecimal() for one in found):
            return torch.from_numpy(found.astype(np.int64))
        log.warning("%s is damaged; its groups are found anew", file)
    groups = make()
    write_file(file, " ".join(map(str, groups.tolist())) + "\n")
    return groups
