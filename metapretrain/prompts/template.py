"""The hard part of a hybrid prompt: text around the sentences and the place of the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch

from metapretrain.errors import InputError, one_of
from metapretrain.prompts.batch import PromptBatch, padded
from metapretrain.prompts.tokens import Ids, continued_ids, plain_ids, special_ids, token_id

KINDS = ("decoder-only", "encoder-decoder", "masked")
SENTINEL = "<extra_id_0>"
ANSWER, FIRST, SECOND = "<X>", "{first}", "{second}"


@dataclass(frozen=True)
class Piece:
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

    Without slots the text is a tail, as "It was <X>." (Huang et al., section 3.1), and the sentences stand in
    front of it. The soft prompt goes in front of everything. Truncation shortens sentences only, the longer
    one of two first. A decoder-only model answers with its next token: what follows `<X>` is left out.

    Raises:
        InputError: `<X>` does not stand there once, or a slot is unknown or repeated.

    Example:
        >>> [piece.text for piece in PromptTemplate("{first}? <X>, {second}").pieces(pair=True)]
        ['{first}', '?', '<X>', ',', '{second}']
        >>> [piece.text for piece in PromptTemplate("It was <X>.").pieces(pair=False)]
        ['{first}', 'It was', '<X>', '.']
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
        """The parts in order, for one sentence a row or two.

        Raises:
            InputError: the text has slots for another number of sentences.
        """
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
        """Tokens of rows (B, N), padded on the right.

        Args:
            tokenizer: of transformers.
            kind: "decoder-only", "encoder-decoder" or "masked": what stands at the place of the answer.
            first, second: sentences, B each.
            max_length: tokens of a row at most, without the soft prompt; must leave room for sentences.

        Raises:
            InputError: no rows, unequal counts, not strings, no room beside the hard text, a tokenizer without
                the mask or sentinel token that is needed, or a slot behind the answer of a decoder-only model.

        Example:
            >>> from metapretrain.models.tiny_text import tiny_tokenizer
            >>> batch = PromptTemplate("It is <X>.").encode(tiny_tokenizer(), "masked", ["no", ""])
            >>> tiny_tokenizer().batch_decode(batch.input_ids), batch.answer.tolist()
            (['[CLS] no it is [MASK]. [SEP]', '[CLS] it is [MASK]. [SEP] [PAD]'], [4, 3])
        """
        one_of("kind", kind, KINDS)
        if isinstance(max_length, bool) or not isinstance(max_length, int):
            raise InputError(f"max_length must be an integer of at least 1, not {max_length!r}")
        _check_texts(first, second)
        pieces = self.pieces(second is not None)
        before, after = special_ids(tokenizer)
        if kind == "decoder-only":
            pieces, after = _before_answer(pieces, self.text), []
        marker = _marker(tokenizer, kind)
        fixed, slots = [_hard_ids(tokenizer, pieces, i, marker) for i in range(len(pieces))], {}
        for i, piece in enumerate(pieces):
            if piece.slot:
                texts = [text.strip() for text in ((second or ()) if piece.text == SECOND else first)]
                slots[i] = _slot_ids(tokenizer, texts, piece, i == 0)
        room = max_length - len(before) - len(after) - sum(map(len, fixed))
        if room < len(slots):
            raise InputError(
                f"max_length is {max_length}, but the hard text of template {self.text!r} and special tokens need"
                f" {max_length - room} tokens; give more"
            )
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
    for name, texts in (("first", first), ("second", second)):
        if texts is None and name == "second":
            continue
        if isinstance(texts, str) or not isinstance(texts, Sized) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{name} must be a list of strings, one a row")
    if second is not None and len(first) != len(second):
        raise InputError(f"sentence pairs need as many first as second sentences, not {len(first)} and {len(second)}")


def _marker(tokenizer: Any, kind: str) -> Ids:
    """The token at the place of the answer."""
    if kind == "decoder-only":
        return []
    wanted = tokenizer.mask_token if kind == "masked" else SENTINEL
    found = token_id(tokenizer, wanted)
    if found is None:
        what = "a mask token" if kind == "masked" else f"the sentinel token {SENTINEL}"
        raise InputError(f"a model of kind {kind} needs {what}, which {type(tokenizer).__name__} does not have")
    return [found]


def _before_answer(pieces: list[Piece], text: str) -> list[Piece]:
    place = [piece.text for piece in pieces].index(ANSWER)
    late = [piece.text for piece in pieces[place:] if piece.slot]
    if late:
        raise InputError(f"template {text!r} has {late[0]} behind {ANSWER}: a decoder-only model cannot see it there")
    return pieces[:place]


def _hard_ids(tokenizer: Any, pieces: list[Piece], i: int, marker: Ids) -> Ids:
    if pieces[i].slot:
        return []
    if pieces[i].text == ANSWER:
        return marker
    return _slot_ids(tokenizer, [pieces[i].text], pieces[i], i == 0)[0]


def _slot_ids(tokenizer: Any, texts: list[str], piece: Piece, start: bool) -> list[Ids]:
    if start:
        return plain_ids(tokenizer, texts)
    return continued_ids(tokenizer, [f" {text}" if piece.space and text else text for text in texts])


def _shortened(lengths: list[int], room: int) -> list[int]:
    """Lengths that fit into `room`, the longest cut first.

    Example:
        >>> _shortened([9, 3], 8), _shortened([9, 9], 7), _shortened([2, 2], 7)
        ([5, 3], [4, 3], [2, 2])
    """
    if len(lengths) < 2 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    first, second = lengths
    short = min(first, second, room // 2)
    if first == short and first <= second:
        return [short, room - short]
    if second == short:
        return [room - short, short]
    return [room - room // 2, room // 2]
