"""The data of a prompts experiment: sets without common sentences, tokens, label words, pseudo labels, meta tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from metapretrain.data.texts import (
    SentenceData,
    TextSet,
    balanced_sample,
    few_shot_draw,
    fixed_sample,
    known_texts,
    without_known,
)
from metapretrain.episodes.groups import group_tasks
from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.prompts.recipe import SENTIMENT, WORDS, PromptRecipe
from metapretrain.files import sha256, write_file
from metapretrain.prompts import PromptBatch, PromptedModel, PromptTemplate, SoftPrompt, Verbalizer

NO_TEXTS = TextSet([])
NO_ROWS = TextSet([], labels=torch.zeros(0, dtype=torch.int64))
PAIR_WORDS = ("no", "yes")
ALL_WORDS = SENTIMENT + PAIR_WORDS


@dataclass(frozen=True)
class PromptData:
    """What all rows of a table share.

    Args:
        pretraining: labelled rows, those that pretraining may read.
        sets: downstream sets with the rows that are reported on.
        tuning: the test parts are left alone: a recipe is chosen by validation.
        plain: sentences without labels, for pseudo labels; `in_downstream` counts those that a downstream set has too.
        labeller: gives them labels, from the sentences, their embeddings, labels and embeddings of labelled rows,
            `rows` and `confidence`; returns a set and what is to be told of it.
        words: label words of sets, in label order; by default the paper's for as many classes, else their names.
    """

    pretraining: TextSet
    sets: tuple[SentenceData, ...]
    tuning: bool = False
    plain: TextSet = NO_TEXTS
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labeller: Callable[..., tuple[TextSet, dict[str, float]]] | None = None

    @classmethod
    def of(
        cls,
        pretraining: SentenceData | None,
        sets: Sequence[SentenceData],
        recipe: PromptRecipe,
        tuning: bool = False,
        plain: TextSet = NO_TEXTS,
        words: Mapping[str, tuple[str, ...]] | None = None,
        labeller: Callable[..., tuple[TextSet, dict[str, float]]] | None = None,
    ) -> PromptData:
        """Sample the pretraining and test rows, the same for all methods and seeds; drop and count known sentences.

        Without a set for pretraining, only rows that start from no pretraining can be run.
        InputError: no set, two of one name, fewer rows left than are to be drawn, or not a word for each class.
        """
        names = [one.name for one in sets]
        if not names or len(set(names)) < len(names):
            raise InputError(f"give downstream sets, each once; got {', '.join(names) or 'none'}")
        for one in sets:
            given = (words or {}).get(one.name)
            if given is not None and len(given) != one.num_classes:
                raise InputError(f"{one.name} has {one.num_classes} classes and {len(given)} words; give one for each")
        rows = NO_ROWS if pretraining is None else pretraining.train
        known = known_texts(rows.first)
        kept = []
        for one in sets:
            train = without_known(one.train, known)
            test = fixed_sample(without_known(one.test, known), recipe.test_rows)
            few_shot_draw(train, recipe.examples, recipe.validation, seed=0, stratified=recipe.stratified)
            kept.append(replace(one, train=train, test=test))
        if recipe.rows is not None and len(rows):
            rows = balanced_sample(rows, min(recipe.rows, len(rows)), seed=0)
        if len(plain):
            seen = known_texts(text for one in kept for part in (one.train, one.test) for text in part.first)
            plain = without_known(plain, seen, "in_downstream")
        return cls(rows, tuple(kept), tuning, plain, dict(words or {}), labeller)

    def words_of(self, one: SentenceData | None) -> tuple[str, ...]:
        """The label words of a set, in label order; None: those of pretraining."""
        if one is None:
            return SENTIMENT
        usual = {2: PAIR_WORDS} if one.pairs else WORDS
        return self.words.get(one.name) or usual.get(one.num_classes) or one.classes

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The words of all sets, each once."""
        return tuple(dict.fromkeys((*ALL_WORDS, *(word for one in self.sets for word in self.words_of(one)))))

    def numbers_of(self, one: SentenceData | None) -> tuple[int, ...]:
        """Numbers in `vocabulary` of the words of a set's classes."""
        return tuple(map(self.vocabulary.index, self.words_of(one)))

    @property
    def test(self) -> tuple[TextSet, ...]:
        return () if self.tuning else tuple(one.test for one in self.sets)

    @property
    def counts(self) -> dict[str, int]:
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
        sizes, stratified = (recipe.examples, recipe.validation), recipe.stratified
        return {one.name: few_shot_draw(one.train, *sizes, seed=seed, stratified=stratified) for one in self.sets}


@dataclass(frozen=True)
class Pool:
    """Rows on a device, right-padded; `labels` of the batch are numbers of label words, `lengths` lie on the CPU.

    `allowed`: the words (N, W) that each row's label may be, where they differ from row to row.
    """

    batch: PromptBatch
    lengths: Tensor
    allowed: Tensor | None = None

    @classmethod
    def of(cls, batch: PromptBatch, device: str, allowed: Tensor | None = None) -> Pool:
        return cls(batch.to(device), batch.attention_mask.sum(1).cpu(), allowed)

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, rows: Tensor) -> PromptBatch:
        """Rows of these numbers, on the CPU and of any shape, as wide as the longest; the host does not wait."""
        multiple = 16 if self.batch.answer.is_cuda else 8  # a recorded step pays for few shapes
        width = -(-int(self.lengths[rows].max()) // multiple) * multiple
        batch = self.batch
        narrow = replace(batch, input_ids=batch.input_ids[:, :width], attention_mask=batch.attention_mask[:, :width])
        return narrow.take(rows.to(batch.answer.device, non_blocking=True))


def encode_rows(model: PromptedModel, template: str, rows: TextSet, words: Sequence[int]) -> PromptBatch:
    """Tokens and word numbers of a set's rows."""
    labels = torch.tensor(words)[rows.require_labels()]
    fitted = PromptedModel(model.model, PromptTemplate(template), model.verbalizer, max_length=model.max_length)
    return fitted.encode(rows.first, rows.second, labels)


def side_by_side(batches: Sequence[PromptBatch]) -> PromptBatch:
    """All rows of several batches, with padding on the right where they are shorter."""
    width = max(batch.input_ids.shape[1] for batch in batches)

    def rows(parts: tuple[Tensor, ...]) -> Tensor:
        wide = (pad(part, (0, width - part.shape[1])) if part.ndim > 1 else part for part in parts)
        return torch.cat(list(wide))

    leaves = map(rows, zip(*(batch.leaves() for batch in batches), strict=True))
    return replace(PromptBatch.of(*leaves), truncated=sum(batch.truncated for batch in batches))


def allowed_words(words: Sequence[Sequence[int]], total: int, device: str) -> Tensor:
    """Which of the `total` words each of R sets uses, bool (R, total)."""
    mask = torch.zeros(len(words), total, dtype=torch.bool)
    for row, own in enumerate(words):
        mask[row, list(own)] = True
    return mask.to(device)


def fewer_labels(labels: Tensor, count: int) -> Tensor:
    """Labels of 5 sentiments (N,) as those of 3 or 2, in which the middle one is -1."""
    if count == len(SENTIMENT):
        return labels
    side = (labels - len(SENTIMENT) // 2).sign()
    return side + 1 if count == 3 else torch.where(side == 0, -1, (side + 1) // 2)


def word_scores(model: PromptedModel, prompts: Tensor, batch: PromptBatch, allowed: Tensor, normalise: str) -> Tensor:
    """Log-probabilities (R, B, W) of the words, -inf for those that a set does not use.

    `model` normalises over the vocabulary; prompts (R, L, D), rows (R, B), `allowed` (R, W) or (R, B, W).
    """
    scores: Tensor = model(prompts, batch)
    scores = scores.masked_fill(~(allowed if allowed.ndim == 3 else allowed[:, None, :]), -torch.inf)
    return scores.log_softmax(-1) if normalise == "labels" else scores


log = logging.getLogger(__name__)


def kept_groups(folder: Path, texts: Sequence[str], k: int, seed: int, make: Callable[[], Tensor]) -> Tensor:
    """Groups (N,) of LDA as `make` finds them, or as an earlier process did for the same N texts, k and seed.

    They are files in `folder`, named by a checksum of texts and scikit-learn's version; a damaged one is made anew.
    """
    digest = sha256("\0".join([version("scikit-learn"), *texts]).encode())[:16]
    file = folder / "groups" / f"lda-{k}-seed{seed}-{digest}.txt"
    if file.is_file():
        checksum, _, words = file.read_text(errors="replace").partition("\n")
        if checksum == sha256(words.encode()):
            return torch.tensor([int(word) for word in words.split()])
        log.warning("%s is damaged, or of an older version; its groups are found anew", file)
    groups = make()
    words = " ".join(map(str, groups.tolist()))
    write_file(file, f"{sha256(words.encode())}\n{words}")
    return groups


Places = dict[tuple[int, str], tuple[Tensor, Tensor]]


class PromptInputs:
    """Model and tokens of an experiment; each is made when it is first asked for.

    `cache`: folder of the converted language model (None: the user's) and of LDA's meta tasks (None: not kept);
    `features`: sentence embeddings (N, D) that are known already, by source.
    """

    def __init__(
        self,
        recipe: PromptRecipe,
        data: PromptData,
        machine: Machine,
        cache: Path | None = None,
        features: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.recipe, self.data, self.machine, self.cache = recipe, data, machine, cache
        self._pools: dict[tuple[str, tuple[int, ...]], Pool] = {}
        self._tests: dict[str, Pool] = {}
        self._features = dict(features or {})
        self._groups: dict[tuple[str, str, int], Tensor] = {}

    @cached_property
    def prompted(self) -> PromptedModel:
        """The language model with the words of all sets."""
        from metapretrain.models.language_models import load_language_model

        r = self.recipe
        model, tokenizer = load_language_model(r.model, cache=self.cache)
        try:
            words = Verbalizer(self.data.vocabulary, tokenizer, several=r.several)
        except InputError as error:
            told = "; in run_prompts.py, --table words=A,B names others, and --set several=true allows several tokens"
            raise InputError(f"{error}{told}") from error
        # Frozen weights need no float32 copy: their casts would be most of a small pass.
        dtype = torch.bfloat16 if self.machine.precision == "bf16" else torch.float32
        model = model.to(self.machine.device, dtype)
        return PromptedModel(model, PromptTemplate(r.template), words, max_length=r.max_length)

    def of_set(self, one: SentenceData | None = None) -> PromptedModel:
        """The model with words and template of one set, or those of pretraining, as a prompt is saved with."""
        r, words = self.recipe, self.data.words_of(one)
        model, tokenizer = self.prompted.model, self.prompted.verbalizer.tokenizer
        verbalizer = Verbalizer(words, tokenizer, several=r.several)
        template, normalise = PromptTemplate(self._template(one)), r.normalise
        return PromptedModel(model, template, verbalizer, max_length=r.max_length, normalise=normalise)

    def start(self, kind: str, seed: int) -> Tensor:
        """A prompt (L, D) to begin with; (0, D) for "none"."""
        r, features = self.recipe, self.prompted.features
        if kind == "none":
            return torch.zeros(0, features)
        if kind == "vocabulary":
            return SoftPrompt.from_vocabulary(r.length, self.prompted.model, seed=seed).weight.detach().float()
        return SoftPrompt.random(r.length, features, spread=r.spread, seed=seed).weight.detach()

    def pretraining(self, source: str, counts: tuple[int, ...] = ()) -> Pool:
        """The rows that pretraining may read; with `counts`, all N with labels of each count, one after the other."""
        if (source, counts) not in self._pools:
            words, r, device = self.data.numbers_of(None), self.recipe, self.machine.device
            texts, allowed = self.texts(source), None
            batch = encode_rows(self.prompted, r.template, texts, words)
            log.info("%d of %d pretraining rows were cut to %d tokens", batch.truncated, len(batch), r.max_length)
            if counts:
                used = [tuple(map(self.data.vocabulary.index, WORDS[count])) for count in counts]
                labels = (fewer_labels(texts.require_labels(), count).clamp(min=0) for count in counts)
                own = zip(labels, used, strict=True)
                batch = side_by_side([replace(batch, labels=torch.tensor(words)[y]) for y, words in own])
                allowed = allowed_words(used, len(self.prompted.verbalizer), device).repeat_interleave(len(texts), 0)
            self._pools[source, counts] = Pool.of(batch, device, allowed)
        return self._pools[source, counts]

    def rows_by_labels(self, groups: Tensor, source: str, counts: tuple[int, ...]) -> Tensor:
        """The groups (N x C,) of rows in :meth:`pretraining`, group k with labels of the count whose turn it is."""
        labels, turn = self.texts(source).require_labels(), groups % len(counts)
        fits = (torch.where((turn == i) & (fewer_labels(labels, n) >= 0), groups, -1) for i, n in enumerate(counts))
        return torch.cat([*fits])

    def texts(self, source: str) -> TextSet:
        """Labelled rows, or plain sentences with pseudo labels."""
        return self.data.pretraining if source == "labelled" else self.pseudo[0]

    @cached_property
    def pseudo(self) -> tuple[TextSet, dict[str, float]]:
        """Plain sentences that a classifier labelled, and how good it is; InputError without such sentences."""
        plain, r, labeller = self.data.plain, self.recipe, self.data.labeller
        if not len(plain) or labeller is None:
            raise InputError("rows on pseudo labels need plain sentences, and none were given")
        known = self.data.pretraining.require_labels(), self.features("labelled")
        limits: dict[str, Any] = {"rows": r.rows, "confidence": r.pseudo_confidence}
        texts, about = labeller(plain.first, self._embedded(plain.first), *known, **limits)
        return texts, {**about, "sentences_in_downstream": plain.counts["in_downstream"]}

    def features(self, source: str) -> Tensor:
        """Sentence embeddings (N, D) of the pretraining rows."""
        if source not in self._features:
            self._features[source] = self._embedded(self.texts(source).first)
        return self._features[source]

    @cached_property
    def _embedder(self) -> Any:
        from metapretrain.models.text_encoders import build_text_encoder

        return build_text_encoder(self.recipe.embedder, modules=False).to(self.machine.device)

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

            kept = self.cache if grouping == "lda" else None
            found = make() if kept is None else kept_groups(kept, texts.first, k, seed, make)
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
                parts.append(self._encoded(one, rows))
                place = torch.arange(first, first + len(rows))
                places[seed, one.name] = place[: len(train)], place[len(train) :]
                first += len(rows)
        return Pool.of(side_by_side(parts), self.machine.device), places

    def test(self, one: SentenceData) -> Pool:
        if one.name not in self._tests:
            self._tests[one.name] = Pool.of(self._encoded(one, one.test), self.machine.device)
        return self._tests[one.name]

    def _encoded(self, one: SentenceData, rows: TextSet) -> PromptBatch:
        return encode_rows(self.prompted, self._template(one), rows, self.data.numbers_of(one))

    def _template(self, one: SentenceData | None) -> str:
        return self.recipe.pair_template if one is not None and one.pairs else self.recipe.template
