"""Pretraining data and downstream sets of the prompts benchmark, without sentences that stand in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from metapretrain.data.sentence_sets import (
    SentenceData,
    balanced_sample,
    few_shot_draw,
    fixed_sample,
    known_texts,
    without_known,
)
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError
from metapretrain.tasks.prompt_methods import PromptRecipe

NO_TEXTS = TextSet([])


@dataclass(frozen=True)
class PromptData:
    """What all rows of a table share.

    Args:
        pretraining: labelled rows, those that pretraining may read.
        sets: downstream sets with the rows that are reported on.
        tuning: the test parts are left alone: a recipe is chosen by validation.
        plain: sentences without labels, for pretraining on pseudo labels; how many more there were, which stand in a
            downstream set, is its count `in_downstream`.
    """

    pretraining: TextSet
    sets: tuple[SentenceData, ...]
    tuning: bool = False
    plain: TextSet = NO_TEXTS

    @classmethod
    def of(
        cls, pretraining: SentenceData, sets: Sequence[SentenceData], recipe: PromptRecipe, tuning: bool = False,
        plain: TextSet = NO_TEXTS,
    ) -> PromptData:  # fmt: skip
        """Sample the pretraining and test rows, the same for all methods and seeds; drop and count known sentences.

        Raises:
            InputError: no set, two of one name, or fewer rows left than are to be drawn.
        """
        names = [one.name for one in sets]
        if not names or len(set(names)) < len(names):
            raise InputError(f"give downstream sets, each once; got {', '.join(names) or 'none'}")
        known = known_texts(pretraining.train.first)
        kept = []
        for one in sets:
            train = without_known(one.train, known)
            test = fixed_sample(without_known(one.test, known), recipe.test_rows)
            few_shot_draw(train, recipe.examples, recipe.validation, seed=0, stratified=recipe.stratified)
            kept.append(replace(one, train=train, test=test))
        rows = pretraining.train
        if recipe.rows is not None:
            rows = balanced_sample(rows, min(recipe.rows, len(rows)), seed=0)
        if len(plain):
            seen = known_texts(text for one in kept for part in (one.train, one.test) for text in part.first)
            plain = without_known(plain, seen, "in_downstream")
        return cls(rows, tuple(kept), tuning, plain)

    @property
    def test(self) -> tuple[TextSet, ...]:
        """What runs are reported on: nothing while tuning."""
        return () if self.tuning else tuple(one.test for one in self.sets)

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each part, and what was dropped."""
        found = {"pretraining": len(self.pretraining)}
        for one in self.sets:
            found |= {f"{one.name}_train": len(one.train), f"{one.name}_test": len(one.test)}
            for part, rows in (("train", one.train), ("test", one.test)):
                found |= {f"{one.name}_{part}_{name}": count for name, count in rows.counts.items()}
        return found

    @property
    def files(self) -> dict[str, Any]:
        """The files that all rows read, with checksums; those of `plain` are read for pseudo labels alone."""
        parts = [self.pretraining, *(part for one in self.sets for part in (one.train, one.test))]
        return {name: about for part in parts for name, about in part.files.items()}

    def draws(self, recipe: PromptRecipe, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Rows of each set's training part to tune and to validate on."""
        return {
            one.name: few_shot_draw(
                one.train, recipe.examples, recipe.validation, seed=seed, stratified=recipe.stratified
            )
            for one in self.sets
        }


def majority_class(one: SentenceData) -> int:
    """The most frequent class of the training part, the lowest of equals."""
    return int(torch.bincount(one.train.require_labels(), minlength=one.num_classes).argmax())
