"""The hard part of a hybrid prompt: text around the sentences, the place of the answer, and label words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metapretrain.checks import whole
from metapretrain.errors import InputError, one_of

WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class PromptBatch:
    """Tokenised rows; `...` is (B,), or (K, m) for m rows of each of K tasks.

    `answer`: position of the mask or sentinel token, or the token before a decoder-only answer; `truncated`: rows cut.
    """

    input_ids: Tensor  # (..., N) int64
    attention_mask: Tensor  # (..., N) int64
    answer: Tensor  # (...) int64
    labels: Tensor | None = None  # (...) int64
    truncated: int = 0

    @classmethod
    def of(cls, *leaves: Tensor) -> PromptBatch:
        """The batch of :meth:`leaves`."""
        ids, mask, answer, *labels = leaves
        return cls(ids, mask, answer, labels[0] if labels else None)

    def leaves(self) -> list[Tensor]:
        """Its tensors: ids, mask, answers, and labels if there are any."""
        return [self.input_ids, self.attention_mask, self.answer, *([] if self.labels is None else [self.labels])]

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dimensions."""
        return tuple(self.answer.shape)

    def __len__(self) -> int:
        return len(self.answer)

    def take(self, rows: Tensor) -> PromptBatch:
        """The rows of these numbers, in the shape of `rows`, such as (K, m).

        Example:
            >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
            >>> PromptBatch(ids, (ids > 0).long(), torch.tensor([1, 2])).take(torch.tensor([[0], [1]])).shape
            (2, 1)
        """
        return self._each(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> PromptBatch:
        """The batch on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def trimmed(self, multiple: int = 8) -> PromptBatch:
        """Without columns that are padding in every row, to a width that is a multiple (waits for the device)."""
        whole("multiple", multiple, 1)
        check_batch("the batch", self)
        rows = right_padded(self)
        width = max(multiple, -(-int(rows.attention_mask.sum(-1).max()) // multiple) * multiple)
        return replace(rows, input_ids=rows.input_ids[..., :width], attention_mask=rows.attention_mask[..., :width])

    def flat(self) -> PromptBatch:
        """The same rows with one leading dimension."""
        width, count = self.input_ids.shape[-1], len(self.shape)
        return self._each(lambda t: t.reshape(-1, width) if t.ndim > count else t.reshape(-1))

    def _each(self, change: Callable[[Tensor], Tensor]) -> PromptBatch:
        return replace(PromptBatch.of(*map(change, self.leaves())), truncated=self.truncated)


def check_batch(what: str, batch: PromptBatch) -> None:
    """Raise InputError unless the tensors of `batch` fit each other; no value is read, so no device is waited for."""
    if not isinstance(batch, PromptBatch):
        raise InputError(f"{what} must be a PromptBatch, as encode returns it, not a {type(batch).__name__}")
    ids, shape = batch.input_ids, batch.shape
    if not batch.answer.numel() or not shape:
        raise InputError(f"{what} has no rows: its shape is {shape}")
    parts = {"input_ids": ids, "attention_mask": batch.attention_mask, "answer": batch.answer, "labels": batch.labels}
    for name, tensor in parts.items():
        if tensor is None:
            continue
        wanted = shape if name in ("answer", "labels") else (*shape, *ids.shape[-1:])
        if tuple(tensor.shape) != wanted or tensor.dtype not in WHOLE or tensor.device != ids.device:
            given = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise InputError(f"{name} of {what} is {given}; give int64 {wanted} on {ids.device}")
    if not ids.shape[-1]:
        raise InputError(f"{what} has rows of no tokens: its input_ids are {tuple(ids.shape)}")


def check_tasks(what: str, batch: PromptBatch) -> None:
    """Raise InputError unless the batch holds labelled rows (K, m), m of each of K tasks."""
    check_batch(what, batch)
    if len(batch.shape) != 2 or batch.labels is None:
        given = "no labels" if batch.labels is None else f"rows of shape {batch.shape}"
        raise InputError(f"{what} has {given}; give labelled rows (K, m): m rows of each of K tasks")


def right_padded(batch: PromptBatch) -> PromptBatch:
    """The rows with all padding moved behind the tokens, which neither prompt nor positions then see."""
    mask = batch.attention_mask
    order = torch.argsort(1 - mask, dim=-1, stable=True)
    before = mask.cumsum(-1).gather(-1, batch.answer.clamp(min=0)[..., None])[..., 0] - 1
    return replace(
        batch,
        input_ids=batch.input_ids.gather(-1, order),
        attention_mask=mask.gather(-1, order),
        answer=torch.where(batch.answer < 0, batch.answer, before),
    )


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, N) of rows of unequal length, at least one, padded on the right."""
    if not rows:
        raise InputError("no texts were given; give at least one row")
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(max(1, int(lengths.max()))) < lengths[:, None]).long()
    ids = torch.full(mask.shape, pad)
    ids[mask.bool()] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return ids, mask


Ids = list[int]
ANCHORS = ("a", "x", "0", "the")


def plain_ids(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text at the start of a sequence; what looks like a special token in it is plain text."""
    if not texts:
        return []
    if not callable(tokenizer):
        raise InputError(f"give a tokenizer of transformers, not a {type(tokenizer).__name__}")
    for text in texts:
        try:
            text.encode()  # half of a surrogate pair cannot be
        except (AttributeError, UnicodeEncodeError):
            raise InputError(f"{text!r} is no text that can be tokenised; give a string of whole characters") from None
    off = dict.fromkeys(("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose"), False)
    return [list(row) for row in tokenizer(list(texts), split_special_tokens=True, **off)["input_ids"]]


def continued_ids(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text where it follows another: those behind an anchor that it does not merge with."""
    found: dict[int, Ids] = {row: [] for row, text in enumerate(texts) if not text}
    for anchor in ANCHORS:
        rows = [row for row in range(len(texts)) if row not in found]
        head = plain_ids(tokenizer, [anchor])[0]
        for row, ids in zip(rows, plain_ids(tokenizer, [anchor + texts[row] for row in rows]), strict=True):
            if head and ids[: len(head)] == head:
                found[row] = ids[len(head) :]
    rows = [row for row in range(len(texts)) if row not in found]
    found.update(zip(rows, plain_ids(tokenizer, [texts[row].strip() for row in rows]), strict=True))
    return [found[row] for row in range(len(texts))]


def special_ids(tokenizer: Any) -> tuple[Ids, Ids]:
    """The special tokens that the tokenizer puts before and after a text; InputError if it changes the text, too."""
    plain, whole = plain_ids(tokenizer, ["a"])[0], list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    name = type(tokenizer).__name__
    raise InputError(f"{name} makes other ids of a text when it adds special tokens; use another tokenizer")


KINDS = ("decoder-only", "encoder-decoder", "masked")
SENTINEL = "<extra_id_0>"
ANSWER, FIRST, SECOND = "<X>", "{first}", "{second}"


class Piece(NamedTuple):
    """A slot, the answer's place or hard text, and whether a space stands before it."""

    text: str
    space: bool

    @property
    def slot(self) -> bool:
        """Whether a sentence goes here."""
        return self.text in (FIRST, SECOND)


@dataclass(frozen=True)
class PromptTemplate:
    """Text with a place `<X>` for the answer and slots `{first}` and `{second}` for the sentences.

    Without slots the text is a tail, as "It was <X>." (Huang et al., section 3.1), behind the sentences. The soft
    prompt goes in front of everything. Truncation shortens sentences only, the longer of two first. A decoder-only
    model answers with its next token: what follows `<X>` is left out.
    Raises InputError: `<X>` does not stand there once, or a slot is unknown or repeated.

    Example:
        >>> [piece.text for piece in PromptTemplate("{first}? <X>, {second}").pieces(pair=True)]
        ['{first}', '?', '<X>', ',', '{second}']
    """

    text: str = "It was <X>."

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or self.text.count(ANSWER) != 1:
            raise InputError(f"template {self.text!r} must hold {ANSWER} once: the place of the answer")
        if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", self.text)):
            raise InputError(f"template {self.text!r} has a brace without its other half; slots are {FIRST}, {SECOND}")
        slots = re.findall(r"\{[^{}]*\}", self.text)
        wrong = [slot for slot in slots if slot not in (FIRST, SECOND)]
        if wrong or len(set(slots)) < len(slots) or (slots and FIRST not in slots):
            given = " ".join(slots)
            raise InputError(f"template {self.text!r} has slots {given}; allowed: {FIRST}, {SECOND}, each once")

    def pieces(self, pair: bool) -> list[Piece]:
        """The parts in order, for rows of two sentences or one."""
        text = self.text
        if FIRST not in text:
            text = f"{FIRST} {SECOND} {text}" if pair else f"{FIRST} {text}"
        elif pair != (SECOND in text):
            given, slots = ("two sentences", f"no {SECOND}") if pair else ("one sentence", f"a {SECOND}")
            raise InputError(f"template {text!r} has {slots}, but rows of {given} were given")
        found, space = [], False
        for part in re.split(f"({'|'.join(map(re.escape, (FIRST, SECOND, ANSWER)))})", text):
            if part.strip():
                found.append(Piece(part.strip(), space or part[0].isspace()))
                space = part[-1].isspace()
            elif part:
                space = True
        return found

    def encode(
        self,
        tokenizer: Any,
        kind: str,
        first: Sequence[str],
        second: Sequence[str] | None = None,
        *,
        max_length: int = 128,
    ) -> PromptBatch:
        """Tokens of B rows (B, N), padded on the right, at most `max_length` each, without the soft prompt.

        `kind` is "decoder-only", "encoder-decoder" or "masked": what stands at the place of the answer.
        Raises InputError: no rows, unequal counts, not strings, no room beside the hard text, a tokenizer without the
        mask or sentinel token that is needed, or a slot behind the answer of a decoder-only model.

        Example:
            >>> from metapretrain.models.language_models import tiny_tokenizer
            >>> batch = PromptTemplate("It is <X>.").encode(tiny_tokenizer(), "masked", ["no", ""])
            >>> tiny_tokenizer().batch_decode(batch.input_ids), batch.answer.tolist()
            (['[CLS] no it is [MASK]. [SEP]', '[CLS] it is [MASK]. [SEP] [PAD]'], [4, 3])
        """
        one_of("kind", kind, KINDS)
        whole("max_length", max_length, 1)
        _check_texts(first, second)
        pieces = self.pieces(second is not None)
        before, after = special_ids(tokenizer)
        if kind == "decoder-only":
            place = [piece.text for piece in pieces].index(ANSWER)
            if late := [piece.text for piece in pieces[place:] if piece.slot]:
                told = f"template {self.text!r} has {late[0]} behind {ANSWER}"
                raise InputError(f"{told}: a decoder-only model cannot see it there")
            pieces, after = pieces[:place], []
        marker = _marker(tokenizer, kind)
        fixed: dict[int, Ids] = {}
        slots: dict[int, list[Ids]] = {}
        for i, piece in enumerate(pieces):
            if piece.text == ANSWER:
                fixed[i] = marker
            elif piece.slot:
                texts = [text.strip() for text in ((second or ()) if piece.text == SECOND else first)]
                slots[i] = _piece_ids(tokenizer, texts, piece, i == 0)
            else:
                fixed[i] = _piece_ids(tokenizer, [piece.text], piece, i == 0)[0]
        room = max_length - len(before) - len(after) - sum(map(len, fixed.values()))
        if room < len(slots):
            told = f"the hard text of template {self.text!r} and special tokens need {max_length - room} tokens"
            raise InputError(f"max_length is {max_length}, but {told}; give more")
        rows, answers, truncated = [], [], 0
        for row in range(len(first)):
            lengths = _shortened([len(slots[i][row]) for i in slots], room)
            keep = dict(zip(slots, lengths, strict=True))
            truncated += any(keep[i] < len(slots[i][row]) for i in slots)
            ids, answer = list(before), -1
            for i, piece in enumerate(pieces):
                if piece.text == ANSWER:
                    answer = len(ids)
                ids += slots[i][row][: keep[i]] if i in slots else fixed[i]
            answers.append(len(ids) - 1 if kind == "decoder-only" else answer)
            rows.append(ids + after)
        pad = tokenizer.pad_token_id
        ids_tensor, mask = padded(rows, 0 if pad is None else pad)
        return PromptBatch(ids_tensor, mask, torch.tensor(answers), truncated=truncated)


def _check_texts(first: Sequence[str], second: Sequence[str] | None) -> None:
    for name, texts in (("first", first), ("second", [] if second is None else second)):
        if isinstance(texts, str) or not isinstance(texts, Sized) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{name} must be a list of strings, one a row")
    if second is not None and len(first) != len(second):
        raise InputError(f"sentence pairs need as many first as second sentences, not {len(first)} and {len(second)}")


def _marker(tokenizer: Any, kind: str) -> Ids:
    """The token at the place of the answer."""
    if kind == "decoder-only":
        return []
    wanted = tokenizer.mask_token if kind == "masked" else SENTINEL
    found = None if wanted is None else tokenizer.convert_tokens_to_ids(wanted)
    if found is None or found == tokenizer.unk_token_id:
        what = "a mask token" if kind == "masked" else f"the sentinel token {SENTINEL}"
        raise InputError(f"a model of kind {kind} needs {what}, which {type(tokenizer).__name__} does not have")
    return [int(found)]


def _piece_ids(tokenizer: Any, texts: list[str], piece: Piece, start: bool) -> list[Ids]:
    if start:
        return plain_ids(tokenizer, texts)
    return continued_ids(tokenizer, [f" {text}" if piece.space and text else text for text in texts])


def _shortened(lengths: list[int], room: int) -> list[int]:
    """Lengths that fit into `room`, the longest cut first."""
    if len(lengths) < 2 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    first, second = lengths
    if first <= second and first <= room // 2:
        return [first, room - first]
    short = min(second, room // 2)
    return [room - short, short]


class Verbalizer:
    """One word per label, in the order of the labels, checked against a tokenizer (Huang et al., section 3.1).

    `several` allows words of several tokens, whose score is the sum of their tokens' log-probabilities; `space`: a
    space stands before the answer in the template.
    Raises InputError: fewer than two words, a word that is empty, unknown to the tokenizer or (unless `several`) of
    several tokens, or two labels with the same tokens or one the beginning of the other.

    Example:
        >>> from metapretrain.models.language_models import tiny_tokenizer
        >>> Verbalizer(["no", "ok"], tiny_tokenizer())
        Verbalizer(no, ok)
    """

    def __init__(self, words: Sequence[str], tokenizer: Any, *, several: bool = False, space: bool = True) -> None:
        if not isinstance(words, list | tuple) or len(words) < 2 or not all(isinstance(word, str) for word in words):
            raise InputError(f"give one word for each of at least two labels, not {words!r}")
        for label, word in enumerate(words):
            if not word.strip():
                raise InputError(f"the word of label {label} is empty")
        self.words = tuple(word.strip() for word in words)
        self.tokenizer, self.several, self.space = tokenizer, several, space
        self.tokens = continued_ids(tokenizer, [f" {word}" if space else word for word in self.words])
        self._check()
        self.longest = max(map(len, self.tokens))
        self._padded: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        return f"Verbalizer({', '.join(self.words)})"

    def padded(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Ids int64 (C, T) and which of them are tokens of the word (C, T), bool; copied to a device once."""
        where = torch.device("cpu" if device is None else device)
        if where not in self._padded:
            with torch.inference_mode(False):  # a training may use them next
                ids, real = padded(self.tokens, 0)
                self._padded[where] = ids.to(where), real.bool().to(where)
        return self._padded[where]

    def _check(self) -> None:
        unknown = self.tokenizer.unk_token_id
        for word, ids in zip(self.words, self.tokens, strict=True):
            # GPT-2 names an ordinary token as its unknown one, which its byte fallback never gives.
            if not ids or (unknown is not None and unknown in ids):
                raise InputError(f"label word {word!r} is unknown to {type(self.tokenizer).__name__}; use another one")
            if len(ids) > 1 and not self.several:
                told = f"{len(ids)} tokens ({' '.join(self.tokenizer.convert_ids_to_tokens(ids))})"
                raise InputError(f"label word {word!r} is {told}; use a word of one token, or pass several=True")
        for (word, ids), (other, longer) in permutations(zip(self.words, self.tokens, strict=True), 2):
            if longer[: len(ids)] == ids:
                how = "the same tokens as" if ids == longer else "the first tokens of"
                raise InputError(f"label word {word!r} is {how} {other!r}: they cannot be told apart")
