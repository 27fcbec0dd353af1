"""Texts made here for the tasks of the scheduling benchmark: stories, dialogues, relations, pairs and questions."""

from __future__ import annotations

import numpy as np
import torch

from metapretrain.data.conll04 import RelationRow, Relations
from metapretrain.data.dialogues import Dialogue, Dialogues
from metapretrain.data.documents import Documents
from metapretrain.data.squad import Question, Questions
from metapretrain.data.texts import TextSet

SIZES = {"train": 64, "validation": 16, "test": 16}
NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
PLACES = ("Arden", "Brook", "Calder", "Dunmore", "Elmsby", "Fairmont")
FIRMS = ("Acorn", "Beacon", "Cobalt", "Delta")
THINGS = ("boat", "clock", "horse", "lamp", "stone", "violin")
ACTS = ("bought", "found", "lost", "painted", "sold")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def made_documents(seed: int = 0) -> dict[str, Documents]:
    """Stories of five sentences whose order shows: someone gets up, goes out, does a thing, rests and sleeps.

    Example:
        >>> print(" ".join(made_documents()["train"].documents[0][0]).split(" , ")[0][:8])
        First on
    """
    return {split: Documents([_story(random) for _ in range(size)], split) for split, size, random in _splits(seed, 1)}


def made_dialogues(seed: int = 0) -> dict[str, Dialogues]:
    """Questions about one of six things; right responses name the thing."""
    found = {}
    for split, size, random in _splits(seed, 2):
        rows = []
        for _ in range(size):
            name, thing, other, act = _pick(NAMES, random), *_two(THINGS, random), _pick(ACTS, random)
            rows.append(
                Dialogue(
                    [f"Have you seen {name} ?", f"Yes , {name} {act} a {thing} ."],
                    [f"Is the {thing} old ?", f"I should like a {thing} too ."],
                    [f"Is the {other} old ?", f"I should like a {other} too ."],
                )
            )
        found[split] = Dialogues(rows, split)
    return found


def made_relations(seed: int = 0) -> dict[str, Relations]:
    """Sentences about where people live and for whom they work."""
    found = {}
    for split, size, random in _splits(seed, 3):
        rows = []
        for _ in range(size):
            name, place, firm = _pick(NAMES, random), _pick(PLACES, random), _pick(FIRMS, random)
            words = f"{name} lives in {place} and works for {firm} .".split()
            entities = [("Peop", 0, 1), ("Loc", 3, 4), ("Org", 7, 8)]
            rows.append(RelationRow(words, entities, {(0, 1): "Live_In", (0, 2): "Work_For"}))
        found[split] = Relations(rows, split)
    return found


def made_pairs(seed: int = 0) -> dict[str, TextSet]:
    """Pairs of sentences: does the second follow from the first (class 1) or does it name another thing (class 0)."""
    found = {}
    for split, size, random in _splits(seed, 4):
        first, second, labels = [], [], torch.arange(size) % 2
        for label in labels.tolist():
            name, act, (thing, other) = _pick(NAMES, random), _pick(ACTS, random), _two(THINGS, random)
            first.append(f"{name} {act} a {thing} on {_pick(DAYS, random)} .")
            second.append(f"{name} {act} a {thing if label else other} .")
        found[split] = TextSet(first, second, labels, split=split)
    return found


def made_questions(seed: int = 0) -> dict[str, Questions]:
    """Stories with a question about who, what or when; the answer is a word of the story."""
    found = {}
    for split, size, random in _splits(seed, 5):
        rows = []
        for row in range(size):
            words = [word for sentence in _story(random) for word in sentence]
            act, thing = next((words[place], words[place + 2]) for place, word in enumerate(words) if word in ACTS)
            wanted = (("Who", NAMES), ("What", THINGS), ("When", DAYS))[row % 3]
            place = next(place for place, word in enumerate(words) if word in wanted[1])
            question = f"{wanted[0]} {act} a {thing} ?" if row % 3 != 1 else f"What was {act} ?"
            rows.append(Question(question, words, place, place, words[place]))
        found[split] = Questions(rows, split)
    return found


def _story(random: np.random.Generator) -> list[list[str]]:
    name, place, thing = _pick(NAMES, random), _pick(PLACES, random), _pick(THINGS, random)
    act, day = _pick(ACTS, random), _pick(DAYS, random)
    text = (
        f"First on {day} {name} got up early .",
        f"Then {name} went to {place} .",
        f"There {name} {act} a {thing} .",
        f"Later the {thing} was shown to friends .",
        f"At last {name} slept in {place} .",
    )
    return [sentence.split() for sentence in text]


def _splits(seed: int, kind: int) -> list[tuple[str, int, np.random.Generator]]:
    return [
        (split, size, np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, kind, place]))))
        for place, (split, size) in enumerate(SIZES.items())
    ]


def _pick(words: tuple[str, ...], random: np.random.Generator) -> str:
    return words[random.integers(len(words))]


def _two(words: tuple[str, ...], random: np.random.Generator) -> tuple[str, str]:
    one, other = random.permutation(len(words))[:2]
    return words[one], words[other]
