"""Sentiment data made here, named and shaped as the prompts benchmark's: what a review's words say is its class."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from metapretrain.data.made_texts import SENTIMENT
from metapretrain.data.sentence_sets import SentenceData
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError

# What reviews speak of: one topic a downstream set, and topics of their own for the pretraining data to have clusters.
PRETRAINING_TOPICS = (
    ("soup", "pizza", "waiter", "salad"),
    ("beer", "bar", "music", "crowd"),
    ("haircut", "nails", "salon", "massage"),
    ("room", "lobby", "pool", "bed"),
    ("garage", "tyres", "mechanic", "brakes"),
)
TOPICS = {
    "sst5": ("film", "cast", "story", "plot"),
    "sst2": ("comedy", "director", "script", "scene"),
    "amazon5": ("phone", "camera", "charger", "cable"),
    "amazon2": ("novel", "kettle", "disc", "radio"),
    "sentihood": ("street", "area", "station", "market"),
    "semeval-restaurant": ("dinner", "sushi", "wine", "service"),
    "semeval-laptop": ("laptop", "keyboard", "screen", "battery"),
}
FIVE = ("very negative", "negative", "neutral", "positive", "very positive")
CLASSES = {
    "sst5": FIVE,
    "amazon5": FIVE,
    "semeval-restaurant": ("negative", "neutral", "positive"),
    "semeval-laptop": ("negative", "neutral", "positive"),
}
TWO = ("negative", "positive")
ADJECTIVES = {
    5: SENTIMENT,
    3: (SENTIMENT[0] + SENTIMENT[1], SENTIMENT[2], SENTIMENT[3] + SENTIMENT[4]),
    2: (SENTIMENT[0] + SENTIMENT[1], SENTIMENT[3] + SENTIMENT[4]),
}
PAIRS = {"rte": ("not entailment", "entailment"), "mrpc": ("different", "paraphrase")}
NOTE = "made by the project: for trying out, not for figures"


def made_sentiment(seed: int = 0, pretraining: int = 200) -> dict[str, SentenceData]:
    """Make small data sets under the names that :func:`~metapretrain.data.sentiment.load_sentiment` reads.

    A review says two things with adjectives of its class; each downstream set has its own topic, the pretraining
    data has five topics, and no review stands twice in a set.

    Args:
        seed: of the rows.
        pretraining: training rows of ``"yelp5"``, 50 to 1,000.

    Returns:
        the seven downstream sets of 100 training and 30 test rows, ``"yelp5"``, and pairs ``"rte"`` and ``"mrpc"``.

    Raises:
        InputError: a number of rows outside of 50..1,000.

    Example:
        >>> made = made_sentiment()
        >>> made["semeval-laptop"].classes, len(made["yelp5"].train), made["rte"].pairs
        (('negative', 'neutral', 'positive'), 200, True)
    """
    if isinstance(pretraining, bool) or not isinstance(pretraining, int) or not 50 <= pretraining <= 1_000:
        raise InputError(f"made pretraining data has 50 to 1,000 rows, got {pretraining!r}")
    random = np.random.Generator(np.random.Philox(seed))
    made = {"yelp5": _reviews("yelp5", FIVE, PRETRAINING_TOPICS, (pretraining, 50), random)}
    for name, topic in TOPICS.items():
        made[name] = _reviews(name, CLASSES.get(name, TWO), (topic,), (100, 30), random)
    for name, classes in PAIRS.items():
        made[name] = _pairs(name, classes, random)
    return made


def made_plain(seed: int = 0, rows: int = 60) -> list[str]:
    """Make sentences without labels, to be given pseudo labels.

    Example:
        >>> len(made_plain(rows=10)), made_plain(rows=10) == made_plain(rows=10)
        (10, True)
    """
    random = np.random.Generator(np.random.Philox(seed))
    things = ("garden", "train", "letter", "meeting", "journey", "weather", "cousin", "lesson")
    every = [word for words in SENTIMENT for word in words]
    picks = random.integers((len(things), len(every), len(things)), size=(rows, 3))
    return [f"he said the {things[a]} was {every[b]} after the {things[c]}" for a, b, c in picks.tolist()]


def _reviews(
    name: str,
    classes: tuple[str, ...],
    topics: tuple[tuple[str, ...], ...],
    sizes: tuple[int, int],
    random: np.random.Generator,
) -> SentenceData:
    kinds: list[list[str]] = []  # unlike reviews of one class and topic, shuffled
    for words, topic in product(ADJECTIVES[len(classes)], topics):
        texts = [f"the {a} was {x} and the {b} {y}" for a, b, x, y in product(topic, topic, words, words) if a != b]
        kinds.append([texts[row] for row in random.permutation(len(texts))])
    rows = [(kinds[row % len(kinds)].pop(), row % len(kinds) // len(topics)) for row in range(sum(sizes))]
    parts = {"train": rows[: sizes[0]], "test": rows[sizes[0] :]}
    made = [
        TextSet(
            [text for text, _ in part],
            labels=torch.tensor([label for _, label in part]),
            ids=[f"{name}-{split}-{row}" for row in range(len(part))],
            split=split,
        )
        for split, part in parts.items()
    ]
    return SentenceData(name, classes, made[0], made[1], NOTE)


def _pairs(name: str, classes: tuple[str, ...], random: np.random.Generator) -> SentenceData:
    things = [thing for topic in TOPICS.values() for thing in topic]
    words = [word for group in SENTIMENT for word in group]
    made = []
    for split, size in (("train", 100), ("test", 30)):
        thing, first, second = (random.permutation(size) % len(things), *random.integers(len(words), size=(2, size)))
        labels = np.arange(size) % 2
        other = np.where(labels == 1, thing, (thing + random.integers(1, len(things), size=size)) % len(things))
        made.append(
            TextSet(
                [
                    f"the {things[a]} was {words[x]} and {words[y]}"
                    for a, x, y in zip(thing, first, second, strict=True)
                ],
                [f"the {things[b]} was {words[x]}" for b, x in zip(other, first, strict=True)],
                torch.from_numpy(labels).long(),
                [f"{name}-{split}-{row}" for row in range(size)],
                split,
            )
        )
    return SentenceData(name, classes, made[0], made[1], NOTE)
