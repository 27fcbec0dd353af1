"""Synthetic texts in the formats of the real sets, for trying out and for tests."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from numpy.random import Generator

from metapretrain.checks import whole
from metapretrain.data.annotated import Dialogue, Question, RelationRow
from metapretrain.data.documents import Documents
from metapretrain.data.texts import Rows, SentenceData, TextSet, TextTask
from metapretrain.draws import philox_generator

SENTIMENT = (
    ("dreadful", "awful", "hateful"),
    ("dull", "weak", "clumsy"),
    ("plain", "usual", "average"),
    ("good", "pleasant", "clever"),
    ("superb", "brilliant", "wonderful"),
)
FIVE = ("very negative", "negative", "neutral", "positive", "very positive")
# Each entry is two words for one thing: a paraphrase may change one into the other.
ACTORS = (("doctor", "physician"), ("kid", "child"), ("lawyer", "attorney"), ("robber", "thief"), ("pupil", "student"))
ACTIONS = (("buys", "purchases"), ("repairs", "mends"), ("hides", "conceals"), ("shows", "displays"), ("takes", "gets"))
COLOURS = (("red", "scarlet"), ("grey", "ashen"), ("huge", "giant"), ("tiny", "little"), ("old", "ancient"))
THINGS = (("car", "automobile"), ("boat", "ship"), ("sofa", "couch"), ("stone", "rock"), ("coat", "jacket"))
PLACES = (("house", "home"), ("shop", "store"), ("wood", "forest"), ("street", "road"), ("hill", "mound"))
SLOTS = (ACTORS, ACTIONS, COLOURS, THINGS, PLACES)

Row = tuple[str, str | None, float]


def made_tasks(seed: int = 0, rows: int = 64) -> list[TextTask]:
    """Three small tasks that can be learned, named and shaped as CS224N's: ``sst``, ``para`` and ``sts``.

    A review's class is that of its adjectives; a paraphrase says the same five things in other words, else two of them
    are changed; a similarity (0..5) counts the things that two sentences share, a synonym half. Validation and test
    have a quarter of `rows` (at least 8), dev half; test has no labels.

    Example:
        >>> sst, para, sts = made_tasks(rows=8)
        >>> len(sst.train), len(para.dev), sts.test.labels, sts.high
        (8, 4, None, 5.0)
    """
    whole("rows of a synthetic task", rows, 8)
    kinds = {"sst": ("classification", _review), "para": ("pair-classification", _question)}
    kinds["sts"] = ("pair-regression", _similar)
    tasks = []
    for number, (name, (kind, make)) in enumerate(kinds.items()):
        random = Generator(np.random.Philox(key=[seed, number]))
        sizes = {"train": rows, "validation": rows // 4, "dev": rows // 2, "test": rows // 4}
        train, held, dev, test = (_split(name, split, size, make, random) for split, size in sizes.items())
        classes = {"sst": FIVE, "para": ("different", "duplicate"), "sts": ()}[name]
        high = 5.0 if name == "sts" else 1.0
        tasks.append(TextTask(name, kind, train, held, dev, replace(test, labels=None), classes, high=high))
    return tasks


def _split(name: str, split: str, size: int, make: Callable[[int, Generator], Row], random: Generator) -> TextSet:
    made = [make(row, random) for row in range(size)]
    dtype = torch.float32 if name == "sts" else torch.int64
    return TextSet(
        [row[0] for row in made],
        None if name == "sst" else [row[1] or "" for row in made],
        torch.tensor([row[2] for row in made]).to(dtype),
        [f"{name}-{split}-{row}" for row in range(size)],
        split,
    )


def _review(row: int, random: Generator) -> Row:
    label = row % len(SENTIMENT)
    thing = ("film", "story", "cast", "music", "plot")[random.integers(5)]
    words = random.permutation(SENTIMENT[label])[:2]
    return (f"the {thing} is {words[0]} and {words[1]}", None, label)


def _question(row: int, random: Generator) -> Row:
    label = row % 2
    facts = random.integers(5, size=5)
    other = facts.copy()
    if not label:
        changed = random.permutation(5)[:2]
        other[changed] = (facts[changed] + random.integers(1, 5, size=2)) % 5
    forms = random.integers(2, size=(2, 5))
    return (f"why {_sentence(facts, forms[0])} ?", f"why {_sentence(other, forms[1])} ?", label)


def _similar(row: int, random: Generator) -> Row:
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


# One topic per downstream set, and five for the pretraining data, which then has clusters.
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
CLASS_NAMES = {
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
    """Small synthetic sets under the names that :func:`~metapretrain.data.registry.load_sentiment` reads, by name.

    Seven downstream sets of 100 training and 30 test rows, each with its own topic; ``"yelp5"`` of `pretraining` rows
    (50 to 1,000) with five topics; the pairs ``"rte"`` and ``"mrpc"``. A review has two adjectives of its class.

    Example:
        >>> made = made_sentiment()
        >>> made["semeval-laptop"].classes, len(made["yelp5"].train), made["rte"].pairs
        (('negative', 'neutral', 'positive'), 200, True)
    """
    whole("rows of synthetic pretraining data", pretraining, 50, 1_000)
    random = philox_generator(seed)
    made = {"yelp5": _reviews("yelp5", FIVE, PRETRAINING_TOPICS, (pretraining, 50), random)}
    for name, topic in TOPICS.items():
        made[name] = _reviews(name, CLASS_NAMES.get(name, TWO), (topic,), (100, 30), random)
    for name, classes in PAIRS.items():
        made[name] = _pairs(name, classes, random)
    return made


def _reviews(
    name: str, classes: tuple[str, ...], topics: tuple[tuple[str, ...], ...], sizes: tuple[int, int], random: Generator
) -> SentenceData:
    kinds: list[list[str]] = []  # unlike reviews of one class and topic, shuffled
    for words, topic in product(ADJECTIVES[len(classes)], topics):
        texts = [f"the {a} was {x} and the {b} {y}" for a, b, x, y in product(topic, topic, words, words) if a != b]
        kinds.append([texts[row] for row in random.permutation(len(texts))])
    rows = [(kinds[row % len(kinds)].pop(), row % len(kinds) // len(topics)) for row in range(sum(sizes))]
    made = []
    for split, part in (("train", rows[: sizes[0]]), ("test", rows[sizes[0] :])):
        texts, labels = [text for text, _ in part], torch.tensor([label for _, label in part])
        ids = [f"{name}-{split}-{row}" for row in range(len(part))]
        made.append(TextSet(texts, labels=labels, ids=ids, split=split))
    return SentenceData(name, classes, made[0], made[1], NOTE)


def _pairs(name: str, classes: tuple[str, ...], random: Generator) -> SentenceData:
    things = [thing for topic in TOPICS.values() for thing in topic]
    words = [word for group in SENTIMENT for word in group]
    made = []
    for split, size in (("train", 100), ("test", 30)):
        thing, first, second = (random.permutation(size) % len(things), *random.integers(len(words), size=(2, size)))
        labels = np.arange(size) % 2
        other = np.where(labels == 1, thing, (thing + random.integers(1, len(things), size=size)) % len(things))
        said = list(zip(thing, other, first, second, strict=True))
        left = [f"the {things[a]} was {words[x]} and {words[y]}" for a, _, x, y in said]
        right = [f"the {things[b]} was {words[x]}" for _, b, x, _ in said]
        ids = [f"{name}-{split}-{row}" for row in range(size)]
        made.append(TextSet(left, right, torch.from_numpy(labels).long(), ids, split))
    return SentenceData(name, classes, made[0], made[1], NOTE)


SIZES = {"train": 64, "validation": 16, "test": 16}
NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
TOWNS = ("Arden", "Brook", "Calder", "Dunmore", "Elmsby", "Fairmont")
FIRMS = ("Acorn", "Beacon", "Cobalt", "Delta")
OBJECTS = ("boat", "clock", "horse", "lamp", "stone", "violin")
ACTS = ("bought", "found", "lost", "painted", "sold")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
LIVES = {(0, 1): "Live_In", (0, 2): "Work_For"}
Made = TypeVar("Made")


def made_documents(seed: int = 0) -> dict[str, Documents]:
    """Synthetic stories of five sentences in order: someone gets up, goes out, does a thing, rests and sleeps."""
    return {split: Documents(rows, split) for split, rows in _rows(seed, 1, lambda _, random: _story(random)).items()}


def made_dialogues(seed: int = 0) -> dict[str, Rows[Dialogue]]:
    """Questions about one of six things; right responses name the thing."""

    def row(_: int, random: Generator) -> Dialogue:
        name, thing, other, act = _pick(NAMES, random), *_two(OBJECTS, random), _pick(ACTS, random)
        context = [f"Have you seen {name} ?", f"Yes , {name} {act} a {thing} ."]
        right, wrong = ([f"Is the {one} old ?", f"I should like a {one} too ."] for one in (thing, other))
        return Dialogue(context, right, wrong)

    return {split: Rows(rows, split) for split, rows in _rows(seed, 2, row).items()}


def made_relations(seed: int = 0) -> dict[str, Rows[RelationRow]]:
    """Sentences about where people live and for whom they work."""

    def row(_: int, random: Generator) -> RelationRow:
        name, place, firm = _pick(NAMES, random), _pick(TOWNS, random), _pick(FIRMS, random)
        words = f"{name} lives in {place} and works for {firm} .".split()
        return RelationRow(words, [("Peop", 0, 1), ("Loc", 3, 4), ("Org", 7, 8)], dict(LIVES))

    return {split: Rows(rows, split) for split, rows in _rows(seed, 3, row).items()}


def made_pairs(seed: int = 0) -> dict[str, TextSet]:
    """Pairs of sentences: does the second follow from the first (class 1) or does it name another thing (class 0)."""

    def row(number: int, random: Generator) -> tuple[str, str]:
        name, act, (thing, other) = _pick(NAMES, random), _pick(ACTS, random), _two(OBJECTS, random)
        first = f"{name} {act} a {thing} on {_pick(DAYS, random)} ."
        return first, f"{name} {act} a {thing if number % 2 else other} ."

    made = {}
    for split, rows in _rows(seed, 4, row).items():
        first, second = map(list, zip(*rows, strict=True))
        made[split] = TextSet(first, second, torch.arange(SIZES[split]) % 2, split=split)
    return made


def made_questions(seed: int = 0) -> dict[str, Rows[Question]]:
    """Stories with a question about who, what or when; the answer is a word of the story."""

    def row(number: int, random: Generator) -> Question:
        words = [word for sentence in _story(random) for word in sentence]
        act, thing = next((words[place], words[place + 2]) for place, word in enumerate(words) if word in ACTS)
        asked, answers = (("Who", NAMES), ("What", OBJECTS), ("When", DAYS))[number % 3]
        place = next(place for place, word in enumerate(words) if word in answers)
        question = f"What was {act} ?" if asked == "What" else f"{asked} {act} a {thing} ?"
        return Question(question, words, place, place, words[place])

    return {split: Rows(rows, split) for split, rows in _rows(seed, 5, row).items()}


def _story(random: Generator) -> list[list[str]]:
    name, place, thing = _pick(NAMES, random), _pick(TOWNS, random), _pick(OBJECTS, random)
    act, day = _pick(ACTS, random), _pick(DAYS, random)
    text = (
        f"First on {day} {name} got up early .",
        f"Then {name} went to {place} .",
        f"There {name} {act} a {thing} .",
        f"Later the {thing} was shown to friends .",
        f"At last {name} slept in {place} .",
    )
    return [sentence.split() for sentence in text]


def _rows(seed: int, kind: int, row: Callable[[int, Generator], Made]) -> dict[str, list[Made]]:
    """The rows of each split, made one after the other by a generator of the split's own."""
    made = {}
    for place, (split, size) in enumerate(SIZES.items()):
        random = philox_generator(seed, kind, place)
        made[split] = [row(number, random) for number in range(size)]
    return made


def _pick(words: tuple[str, ...], random: Generator) -> str:
    return words[random.integers(len(words))]


def _two(words: tuple[str, ...], random: Generator) -> tuple[str, str]:
    one, other = random.permutation(len(words))[:2]
    return words[one], words[other]
