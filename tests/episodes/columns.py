"""A column of a table, without a library of tables."""

from __future__ import annotations

from typing import Any

import numpy as np


class Column:
    """As a pandas Series whose index is reversed: [] is by name, tolist and to_numpy are by position."""

    ndim = 1

    def __init__(self, values: list[Any]) -> None:
        self.values, self.iloc = values, values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, name: int) -> Any:
        return self.values[len(self) - 1 - name]

    def to_numpy(self) -> Any:
        return np.array(self.values, dtype=object)

    def tolist(self) -> list[Any]:
        return self.values
