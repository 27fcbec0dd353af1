"""The text data sets that can be read: source, terms, layout, and a check of a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metapretrain.data.cs224n import LAYOUT, QQP_LAYOUT, check_cs224n, check_qqp


@dataclass(frozen=True)
class TextDatasetInfo:
    """One text data set.

    Attributes:
        name: as given to ``metapretrain data``.
        source: address of the publisher.
        terms: of use, in one line.
        layout: what the folder must hold.
        check: returns one line about a folder, or raises InputError.
        needs_folder: whether a data folder must be named.

    Example:
        >>> print(TEXT_DATASETS["qqp"].terms)
        Quora's terms of use: non-commercial research; not to be redistributed
    """

    name: str
    source: str
    terms: str
    layout: str
    check: Callable[[str | Path], str]
    needs_folder: bool = True


_ROWS = (
    TextDatasetInfo(
        name="cs224n",
        source="https://web.stanford.edu/class/cs224n/ (default final project: SST, Quora, SemEval STS)",
        terms="research use, by the terms of SST, Quora and STS-B; cite Socher et al. (2013), Cer et al. (2017)",
        layout=LAYOUT,
        check=check_cs224n,
    ),
    TextDatasetInfo(
        name="qqp",
        source="https://quoradata.quora.com/First-Quora-Dataset-Release-Question-Pairs (parts of it, to add to cs224n)",
        terms="Quora's terms of use: non-commercial research; not to be redistributed",
        layout=QQP_LAYOUT,
        check=check_qqp,
    ),
)
TEXT_DATASETS: dict[str, TextDatasetInfo] = {row.name: row for row in _ROWS}
