"""Dialogue response selection: which of some responses belongs to a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from metapretrain.data.dialogues import Dialogues
from metapretrain.errors import InputError
from metapretrain.tasks.pretraining.forms import ChoiceTask
from metapretrain.tasks.pretraining.frame import Batch, Frame


class ResponseSelection(ChoiceTask):
    """Choose the right one of C responses, given the turns before.

    A row is a dialogue. Each batch draws one of its right responses and its place among the C; wrong ones are the
    dialogue's own, drawn, and right responses of other dialogues where it has too few. Of a long context the last
    tokens are kept, which are next to the response; a response has at most half of the room.

    Args:
        texts: dialogues of each split.
        frame: how sequences are put together.
        choices: C.
        name: of the task; COPA has this form, too.

    Raises:
        InputError: C below 2, or a split with fewer than C dialogues.
    """

    def __init__(
        self, texts: Mapping[str, Dialogues], frame: Frame, *, choices: int = 4, name: str = "response-selection"
    ) -> None:
        small = [split for split, part in texts.items() if 0 < len(part) < choices]
        if choices < 2 or small:
            where = f", and {small[0]} has {len(texts[small[0]])} dialogues" if small else ""
            raise InputError(f"choices must be at least 2 and at most the dialogues of a split, got {choices}{where}")
        self.name, self.choices, self.texts = name, choices, dict(texts)
        spoken = [
            text for part in texts.values() for row in part.dialogues for text in (*row.context, *row.right, *row.wrong)
        ]
        unlike = list(dict.fromkeys(spoken))
        self._ids = dict(zip(unlike, frame.all_ids(unlike), strict=True))
        super().__init__(frame, texts, {split: len(part) for split, part in texts.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`."""
        texts, sequences = self.texts[split], []
        labels = random.integers(self.choices, size=len(rows))
        for row, label in zip(rows, labels, strict=True):
            dialogue = texts.dialogues[row]
            own = random.permutation(len(dialogue.wrong))[: self.choices - 1]
            wrong = [dialogue.wrong[place] for place in own]
            others = random.choice(len(texts), self.choices, replace=False)
            more = [_any(texts.dialogues[other].right, random) for other in others if other != row]
            shown = (wrong + more)[: self.choices - 1]
            shown.insert(int(label), _any(dialogue.right, random))
            context = [token for turn in dialogue.context for token in self._ids[turn]]
            for response in shown:
                answer = self._ids[response][: self.frame.room(2) // 2]
                ids, types, _ = self.frame.sequence(context[len(answer) - self.frame.room(2) :], answer)
                sequences.append((ids, types))
        return self.frame.pad(sequences) | {"labels": torch.from_numpy(labels)}


def _any(texts: Sequence[str], random: np.random.Generator) -> str:
    return texts[int(random.integers(len(texts)))]
