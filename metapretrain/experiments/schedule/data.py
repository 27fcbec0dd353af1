"""The tasks of a scheduling experiment, and its encoders from scratch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metapretrain.errors import InputError, one_of
from metapretrain.experiments.schedule.tasks.base import PretrainingTask
from metapretrain.models.language_models import SPECIAL, random_bert, wordpiece_tokenizer
from metapretrain.models.text_encoders import TextEncoder, build_text_encoder, check_length, longest

# Layers, features and attention heads of a BERT encoder; the feed-forward part has 4 times the features.
SIZES = {"mini": (4, 128, 2), "small": (4, 256, 4), "medium": (8, 384, 6)}
VOCABULARY = 8000
MOST_LETTERS = 6  # of a piece that is no word


def word_pieces(texts: Iterable[str], vocabulary: int = VOCABULARY) -> list[str]:
    """The characters, frequent words, and frequent begins and ends of the other words, of some texts.

    A function of the texts, in any order: the trainers of the tokenizers library settle ties by chance.

    Example:
        >>> word_pieces(["the cat sat", "the cat"], 24)[-2:]
        ['cat', 'the']
    """
    words = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text))
    letters = sorted({letter for word, count in words.items() if count > 1 for letter in word})
    single = [*letters, *(f"##{letter}" for letter in letters)]
    room = max(0, vocabulary - len(SPECIAL) - len(single))
    often = [word for word in _most_frequent(words) if len(word) > 1 and words[word] > 1][: room * 3 // 4]
    parts: Counter[str] = Counter()
    whole = set(often)
    for word in words.keys() - whole:
        for size in range(2, min(MOST_LETTERS, len(word) - 1) + 1):
            parts[word[:size]] += words[word]
            parts[f"##{word[-size:]}"] += words[word]
    kept = [part for part in _most_frequent(parts) if parts[part] > 1 and part not in whole]
    return [*SPECIAL, *single, *kept[: room - len(often)], *sorted(often)]


def _most_frequent(counts: Mapping[str, int]) -> list[str]:
    return sorted(counts, key=lambda name: (-counts[name], name))


def make_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY, *, max_length: int = 128) -> Any:
    """A cased BERT tokenizer whose pieces are :func:`word_pieces` of the texts.

    Args:
        vocabulary: pieces at most, unless there are more characters.

    Example:
        >>> make_tokenizer(["the cat sat on the mat"] * 2, 60).tokenize("the mats")
        ['the', 'mat', '##s']
    """
    pieces = dict.fromkeys(word_pieces(texts, vocabulary))
    return wordpiece_tokenizer(pieces, max_length=max_length, lowercase=False)


def new_encoder(size: str, tokenizer: Any, *, seed: int, dropout: float = 0.1) -> TextEncoder:
    """A BERT encoder of one of :data:`SIZES` with random weights; the global random state is left alone.

    Example:
        >>> from metapretrain.models.language_models import tiny_tokenizer
        >>> encoder = new_encoder("mini", tiny_tokenizer(), seed=0)
        >>> encoder.features, encoder.encode(["a text"]).shape
        (128, torch.Size([1, 128]))
    """
    layers, features, heads = SIZES[one_of("encoder from scratch", size, SIZES)]
    model = random_bert(
        len(tokenizer),
        layers=layers,
        features=features,
        heads=heads,
        hidden=4 * features,
        positions=tokenizer.model_max_length,
        seed=seed,
        dropout=dropout,
    )
    return TextEncoder(model, tokenizer, "mean")


class Encoders:
    """Makes the encoder of each run: of a size from scratch, or any that `build_text_encoder` knows.

    Args:
        name: one of :data:`SIZES`, or a name for `build_text_encoder`.
        texts: training texts that the word pieces of an encoder from scratch come from.
        max_length: tokens of a sequence; at most the positions of the encoder.
    """

    def __init__(self, name: str, texts: Sequence[str] = (), *, max_length: int = 128) -> None:
        self.name = name
        if name in SIZES:
            self.tokenizer = make_tokenizer(texts, max_length=max_length)
        else:
            encoder = self(0)
            check_length(max_length, longest(encoder.model, encoder.tokenizer))
            self.tokenizer = encoder.tokenizer

    def __call__(self, seed: int) -> TextEncoder:
        """An encoder; only one from scratch depends on the seed."""
        if self.name in SIZES:
            return new_encoder(self.name, self.tokenizer, seed=seed)
        return build_text_encoder(self.name, seed=seed, modules=False)


ORDER = {"probe": ("validation", "train"), "report": ("test", "validation")}


@dataclass(frozen=True)
class ScheduleData:
    """Tasks by their part in an experiment; each has one part, and each part a task.

    Args:
        tasks: every task, by name.
        sources: names of the pretraining tasks.
        targets: names of the tasks that downstream-aware utilities look at; their training parts are sources too.
        downstream: names of the tasks that pretrained encoders are fine-tuned on.
        tuning: leave the test parts alone; what is reported are the validation parts.
        files: what was read, with checksums.
    """

    tasks: Mapping[str, PretrainingTask]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    downstream: tuple[str, ...]
    tuning: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for what in ("sources", "targets", "downstream"):
            names: tuple[str, ...] = getattr(self, what)
            if not names:
                raise InputError(f"{what} names no task; there are: {', '.join(self.tasks)}")
            for name in names:
                one_of("task", name, self.tasks)
                if name in seen:
                    raise InputError(f"{name} is among {seen[name]} and {what}; give every task one part")
                seen[name] = what
        for name in seen:
            self.part(name, "report")

    def part(self, name: str, use: str) -> str:
        """The split of a task for a use, `report` or `probe` (target batches of utilities), which is never the same."""
        sizes = self.tasks[name].sizes
        wanted = ("validation",) if use == "report" and self.tuning else ORDER[use]
        found = next((split for split in wanted if split in sizes), None)
        if found is None:
            raise InputError(f"{name} has no rows held out of training; every task of an experiment needs some")
        if use == "probe" and found == self.part(name, "report"):
            return "train"
        return found

    def chosen(self, setting: str) -> tuple[str, ...]:
        """Names of what is chosen from."""
        return self.sources + self.targets if setting == "aware" else self.sources

    def watched(self, setting: str) -> tuple[str, ...]:
        """Names of what utilities look at."""
        return self.targets if setting == "aware" else self.sources

    @property
    def test(self) -> tuple[str, ...]:
        """The downstream tasks, or nothing while a recipe is chosen."""
        return () if self.tuning else self.downstream

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each part of each task."""
        used = (*self.sources, *self.targets, *self.downstream)
        found = {f"{name}_{split}": size for name in used for split, size in self.tasks[name].sizes.items()}
        return {key: size for key, size in found.items() if not (self.tuning and key.endswith("_test"))}
