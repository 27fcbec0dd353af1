"""What all rows of the prompts benchmark share in memory: the language model, tokens and meta tasks, made once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metapretrain.data.sentence_sets import SentenceData
from metapretrain.data.texts import TextSet
from metapretrain.episodes.groups import group_tasks
from metapretrain.errors import InputError
from metapretrain.prompts import PromptedModel, PromptTemplate, SoftPrompt, Verbalizer
from metapretrain.tasks.machine import Machine
from metapretrain.tasks.prompt_data import PromptData
from metapretrain.tasks.prompt_groups import kept_groups
from metapretrain.tasks.prompt_methods import PromptRecipe
from metapretrain.tasks.prompt_pool import ALL_WORDS, SENTIMENT, Pool, encode_rows, joined, words_of
from metapretrain.tasks.prompt_pseudo import pseudo_labelled

log = logging.getLogger(__name__)
Places = dict[tuple[int, str], tuple[Tensor, Tensor]]


class PromptInputs:
    """Model and tokens of an experiment; each is made when it is first asked for.

    Args:
        cache: where a converted language model is kept; None: the user's cache folder. Where one is given, it keeps
            the meta tasks of LDA, too.
        features: sentence embeddings (N, D) that are known already, by source.
    """

    def __init__(
        self, recipe: PromptRecipe, data: PromptData, machine: Machine, cache: Path | None = None,
        features: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.data, self.machine, self.cache = recipe, data, machine, cache
        self._pools: dict[str, Pool] = {}
        self._tests: dict[str, Pool] = {}
        self._features = dict(features or {})
        self._groups: dict[tuple[str, str, int], Tensor] = {}

    @cached_property
    def prompted(self) -> PromptedModel:
        """The language model with the words of all sets."""
        from metapretrain.models.language_models import load_language_model

        r = self.recipe
        model, tokenizer = load_language_model(r.model, cache=self.cache)
        words = Verbalizer(ALL_WORDS, tokenizer, several=r.several)
        # Frozen weights need no float32 copy: their casts would be most of a small pass.
        dtype = torch.bfloat16 if self.machine.precision == "bf16" else torch.float32
        model = model.to(self.machine.device, dtype)
        return PromptedModel(model, PromptTemplate(r.template), words, max_length=r.max_length)

    def of_set(self, one: SentenceData | None = None) -> PromptedModel:
        """The model with words and template of one set, or those of pretraining, as a prompt is saved with."""
        r, words = self.recipe, words_of(len(SENTIMENT), False) if one is None else words_of(one.num_classes, one.pairs)
        tokenizer = self.prompted.verbalizer.tokenizer
        verbalizer = Verbalizer([ALL_WORDS[word] for word in words], tokenizer, several=r.several)
        return PromptedModel(
            self.prompted.model, PromptTemplate(self._template(one)), verbalizer, max_length=r.max_length,
            normalise=r.normalise,
        )  # fmt: skip

    def start(self, kind: str, seed: int) -> Tensor:
        """A prompt (L, D) to begin with; (0, D) for "none"."""
        r, features = self.recipe, self.prompted.features
        if kind == "none":
            return torch.zeros(0, features)
        if kind == "vocabulary":
            return SoftPrompt.from_vocabulary(self.prompted.model, r.length, seed=seed).weight.detach().float()
        return SoftPrompt.random(r.length, features, spread=r.spread, seed=seed).weight.detach()

    def pretraining(self, source: str) -> Pool:
        """The rows that pretraining may read."""
        if source not in self._pools:
            words, r = words_of(len(SENTIMENT), False), self.recipe
            batch = encode_rows(self.prompted, r.template, self.texts(source), words)
            log.info("%d of %d pretraining rows were cut to %d tokens", batch.truncated, len(batch), r.max_length)
            self._pools[source] = Pool.of(batch, self.machine.device)
        return self._pools[source]

    def texts(self, source: str) -> TextSet:
        """Labelled rows, or plain sentences with pseudo labels."""
        return self.data.pretraining if source == "labelled" else self.pseudo[0]

    @cached_property
    def pseudo(self) -> tuple[TextSet, dict[str, float]]:
        """Plain sentences that a classifier labelled, and how good it is.

        Raises:
            InputError: there are no plain sentences.
        """
        plain, r = self.data.plain, self.recipe
        if not len(plain):
            raise InputError("rows on pseudo labels need plain sentences, and none were given")
        texts, about = pseudo_labelled(
            plain.first, self._embedded(plain.first), self.data.pretraining.require_labels(), self.features("labelled"),
            rows=r.rows, confidence=r.pseudo_confidence,
        )  # fmt: skip
        return texts, {**about, "sentences_in_downstream": plain.counts["in_downstream"]}

    def features(self, source: str) -> Tensor:
        """Sentence embeddings (N, D) of the pretraining rows."""
        if source not in self._features:
            self._features[source] = self._embedded(self.texts(source).first)
        return self._features[source]

    @cached_property
    def _embedder(self) -> Any:
        from metapretrain.models.text_encoders import build_text_encoder

        return build_text_encoder(self.recipe.embedder).to(self.machine.device)

    def _embedded(self, texts: Sequence[str]) -> Tensor:
        found: Tensor = self._embedder.encode(list(texts), batch_size=256).cpu()
        return found

    def groups(self, grouping: str, source: str, seed: int) -> Tensor:
        """The meta task (N,) of each pretraining row; those of LDA, which takes a minute, are kept in `cache`."""
        if (grouping, source, seed) not in self._groups:
            texts, k = self.texts(source), self.recipe.meta.clusters

            def make() -> Tensor:
                given: Any = self.features(source) if grouping == "kmeans" else texts.first
                return group_tasks(given, k, grouping, seed, labels=texts.require_labels())

            if grouping == "lda" and self.cache is not None:
                found = kept_groups(self.cache, texts.first, k, seed, make)
            else:
                found = make()
            self._groups[grouping, source, seed] = found
        return self._groups[grouping, source, seed]

    def few_shot(self, seeds: Sequence[int]) -> tuple[Pool, Places]:
        """The rows drawn of all sets for these seeds, and where those to tune and to validate on stand."""
        parts, places, first = [], Places(), 0
        for seed in seeds:
            draws = self.data.draws(self.recipe, seed)
            for one in self.data.sets:
                train, validation = draws[one.name]
                rows = one.train.subset(torch.cat([train, validation]))
                parts.append(
                    encode_rows(self.prompted, self._template(one), rows, words_of(one.num_classes, one.pairs))
                )
                place = torch.arange(first, first + len(rows))
                places[seed, one.name] = place[: len(train)], place[len(train) :]
                first += len(rows)
        return Pool.of(joined(parts), self.machine.device), places

    def test(self, one: SentenceData) -> Pool:
        """The rows that a set is reported on."""
        if one.name not in self._tests:
            words = words_of(one.num_classes, one.pairs)
            batch = encode_rows(self.prompted, self._template(one), one.test, words)
            self._tests[one.name] = Pool.of(batch, self.machine.device)
        return self._tests[one.name]

    def _template(self, one: SentenceData | None) -> str:
        return self.recipe.pair_template if one is not None and one.pairs else self.recipe.template
