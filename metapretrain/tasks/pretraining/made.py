"""Three sources and three targets over texts made by the project, for smoke tests."""

from __future__ import annotations

from typing import Any

from metapretrain.data.made_schedule import made_dialogues, made_documents, made_pairs, made_questions, made_relations
from metapretrain.tasks.pretraining.base import PretrainingTask
from metapretrain.tasks.pretraining.frame import Frame
from metapretrain.tasks.pretraining.masked_lm import MaskedLM
from metapretrain.tasks.pretraining.reading import Reading
from metapretrain.tasks.pretraining.relations import RelationExtraction
from metapretrain.tasks.pretraining.reordering import Reordering
from metapretrain.tasks.pretraining.response_selection import ResponseSelection
from metapretrain.tasks.pretraining.sentences import Sentences

Tasks = dict[str, PretrainingTask]


def made_schedule_tasks(
    seed: int = 0, tokenizer: Any = None, *, max_length: int = 64, multiple: int = 16
) -> tuple[Tasks, Tasks]:
    """Make small tasks of the same kinds as the benchmark's.

    Args:
        seed: of the texts.
        tokenizer: None: that of the ``tiny`` encoder.
        max_length: as :class:`Frame`.
        multiple: as :class:`Frame`.

    Returns:
        sources ``masked-lm``, ``reordering``, ``response-selection``, and targets ``conll04``, ``rte``, ``squad``.

    Example:
        >>> sources, targets = made_schedule_tasks(0)
        >>> list(sources), list(targets)
        (['masked-lm', 'reordering', 'response-selection'], ['conll04', 'rte', 'squad'])
    """
    if tokenizer is None:
        from metapretrain.models.tiny_text import tiny_tokenizer

        tokenizer = tiny_tokenizer()
    frame = Frame(tokenizer, max_length, multiple)
    documents = made_documents(seed)
    sources = (MaskedLM(documents, frame), Reordering(documents, frame), ResponseSelection(made_dialogues(seed), frame))
    targets = (
        RelationExtraction(made_relations(seed), frame),
        Sentences(made_pairs(seed), frame, name="rte"),
        Reading(made_questions(seed), frame),
    )
    return {task.name: task for task in sources}, {task.name: task for task in targets}
