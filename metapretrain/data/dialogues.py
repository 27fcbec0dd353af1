"""Dialogues with right and wrong responses to a context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Dialogue:
    """Turns, and responses to them.

    Attributes:
        context: the turns before, in order.
        right: responses that belong to it, at least one.
        wrong: responses that do not; may be empty.
    """

    context: list[str]
    right: list[str]
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Dialogues:
    """Dialogues of one split.

    Attributes:
        dialogues: the rows.
        split: such as ``"train"``.
        files: as those of :class:`metapretrain.data.TextSet`.

    Example:
        >>> len(Dialogues([Dialogue(["How are you?"], ["Fine."], ["At noon."])]))
        1
    """

    dialogues: list[Dialogue]
    split: str = "train"
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of dialogues."""
        return len(self.dialogues)
