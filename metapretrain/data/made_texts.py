"""Text tasks made here: sentences whose sentiment, paraphrases and similarity follow from how they are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from metapretrain.data.texts import TextSet, TextTask
from metapretrain.errors import InputError

SENTIMENT = (
    ("dreadful", "awful", "hateful"),
    ("dull", "weak", "clumsy"),
    ("plain", "usual", "average"),
    ("good", "pleasant", "clever"),
    ("superb", "brilliant", "wonderful"),
)
CLASSES = ("very negative", "negative", "neutral", "positive", "very positive")
# Each entry is two words for one thing: a paraphrase may change one into the other.
ACTORS = (("doctor", "physician"), ("kid", "child"), ("lawyer", "attorney"), ("robber", "thief"), ("pupil", "student"))
ACTIONS = (("buys", "purchases"), ("repairs", "mends"), ("hides", "conceals"), ("shows", "displays"), ("takes", "gets"))
COLOURS = (("red", "scarlet"), ("grey", "ashen"), ("huge", "giant"), ("tiny", "little"), ("old", "ancient"))
THINGS = (("car", "automobile"), ("boat", "ship"), ("sofa", "couch"), ("stone", "rock"), ("coat", "jacket"))
PLACES = (("house", "home"), ("shop", "store"), ("wood", "forest"), ("street", "road"), ("hill", "mound"))
SLOTS = (ACTORS, ACTIONS, COLOURS, THINGS, PLACES)

Row = tuple[str, str | None, float]


def made_tasks(seed: int = 0, rows: int = 64) -> list[TextTask]:
    """Make three small tasks that can be learned, named and shaped as CS224N's: ``sst``, ``para`` and ``sts``.

    A review's class is the class of its adjectives; a paraphrase says the same five things in other words, its
    opposite changes two of them; a similarity is the number of things that two sentences share, half for a synonym.

    Args:
        seed: of the sentences.
        rows: training rows of a task, at least 8; validation and test have a quarter and dev half as many.

    Returns:
        classification in 5 classes, pair classification in 2, pair regression 0..5 in steps of a half; every class
        is about as frequent, and the test split has no labels.

    Raises:
        InputError: fewer than 8 rows.

    Example:
        >>> sst, para, sts = made_tasks(rows=8)
        >>> len(sst.train), len(para.dev), sts.test.labels, sts.high
        (8, 4, None, 5.0)
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 8:
        raise InputError(f"made tasks need at least 8 rows, got {rows!r}")
    kinds = {"sst": ("classification", _review), "para": ("pair-classification", _question)}
    kinds["sts"] = ("pair-regression", _similar)
    tasks = []
    for number, (name, (kind, make)) in enumerate(kinds.items()):
        random = np.random.Generator(np.random.Philox(key=[seed, number]))
        sizes = {"train": rows, "validation": rows // 4, "dev": rows // 2, "test": rows // 4}
        splits = {split: _split(name, split, size, make, random) for split, size in sizes.items()}
        classes = {"sst": CLASSES, "para": ("different", "duplicate"), "sts": ()}[name]
        high = 5.0 if name == "sts" else 1.0
        test = replace(splits["test"], labels=None)
        tasks.append(
            TextTask(name, kind, splits["train"], splits["validation"], splits["dev"], test, classes, 0.0, high)
        )
    return tasks


def _split(
    name: str, split: str, size: int, make: Callable[[int, np.random.Generator], Row], random: np.random.Generator
) -> TextSet:
    made = [make(row, random) for row in range(size)]
    dtype = torch.float32 if name == "sts" else torch.int64
    return TextSet(
        [row[0] for row in made],
        None if name == "sst" else [row[1] or "" for row in made],
        torch.tensor([row[2] for row in made]).to(dtype),
        [f"{name}-{split}-{row}" for row in range(size)],
        split,
    )


def _review(row: int, random: np.random.Generator) -> Row:
    label = row % len(SENTIMENT)
    thing = ("film", "story", "cast", "music", "plot")[random.integers(5)]
    words = random.permutation(SENTIMENT[label])[:2]
    return (f"the {thing} is {words[0]} and {words[1]}", None, label)


def _question(row: int, random: np.random.Generator) -> Row:
    label = row % 2
    facts = random.integers(5, size=5)
    other = facts.copy()
    if not label:
        changed = random.permutation(5)[:2]
        other[changed] = (facts[changed] + random.integers(1, 5, size=2)) % 5
    forms = random.integers(2, size=(2, 5))
    return (f"why {_sentence(facts, forms[0])} ?", f"why {_sentence(other, forms[1])} ?", label)


def _similar(row: int, random: np.random.Generator) -> Row:
    facts, forms = random.integers(5, size=5), random.integers(2, size=5)
    other, spoken = facts.copy(), forms.copy()
    halves = row % 11
    order = random.permutation(5)
    lost = order[(halves + 1) // 2 :]
    other[lost] = (facts[lost] + random.integers(1, 5, size=len(lost))) % 5
    if halves % 2:
        spoken[order[halves // 2]] ^= 1
    return (_sentence(facts, forms), _sentence(other, spoken), halves / 2)


def _sentence(facts: np.ndarray, forms: np.ndarray) -> str:
    actor, action, colour, thing, place = (
        SLOTS[slot][fact][form] for slot, (fact, form) in enumerate(zip(facts, forms, strict=True))
    )
    return f"the {actor} {action} a {colour} {thing} near the {place}"
