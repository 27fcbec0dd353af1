"""Cached tokens: gathered batches equal the tokenizer's own padding, for tokenizers with and without token types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from metapretrain.data.texts import TextSet
from metapretrain.data.tokens import Tokens, padded_width, tokenize
from metapretrain.errors import InputError

FIRST = ["a red car stops", "why ?", "the old boat is a tiny boat near the red car", "boat"]
SECOND = ["the car is red", "a boat near a boat near a boat near a boat stops", "no", "tiny tiny"]
SINGLE, PAIRS = TextSet(FIRST), TextSet(FIRST, SECOND)


def bert_tokenizer(folder: Path) -> Any:
    words = sorted({word for text in FIRST + SECOND for word in text.split() if word != "?"})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    return transformers.BertTokenizerFast(str(folder / "vocab.txt"))


def roberta_tokenizer(folder: Path) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    model = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    model.train_from_iterator(FIRST + SECOND, vocab_size=280, special_tokens=special, show_progress=False)
    model.save_model(str(folder))
    return transformers.RobertaTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))


@pytest.fixture(params=[bert_tokenizer, roberta_tokenizer])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path)


@pytest.mark.parametrize("texts", [SINGLE, PAIRS], ids=["single", "joined"])
@pytest.mark.parametrize("max_length", [64, 9])
def test_a_batch_equals_the_tokenizers_own_padding(tokenizer: Any, texts: TextSet, max_length: int) -> None:
    tokens = tokenize(texts, tokenizer, max_length=max_length, joined=True)
    rows = torch.tensor([2, 0, 1, 1])
    chosen = texts.subset(rows)
    cut = {"truncation": "longest_first", "max_length": max_length, "return_tensors": "pt"}
    expected = tokenizer(chosen.first, chosen.second, padding=True, **cut)
    width = expected["input_ids"].shape[1]
    batch = tokens.gather(rows, width)
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        assert batch[key].dtype == torch.int64 and torch.equal(batch[key], value), key
    assert int(tokens.lengths[rows].max()) == width
    wider = tokenizer(chosen.first, chosen.second, padding="max_length", **{**cut, "max_length": 70 + max_length})
    if max_length == 64:
        assert torch.equal(tokens.gather(rows, 134)["input_ids"], wider["input_ids"])


def test_pairs_encoded_separately_are_two_single_sets(tokenizer: Any) -> None:
    tokens = tokenize(PAIRS, tokenizer, max_length=12, joined=False)
    first = tokenize(SINGLE, tokenizer, max_length=12, joined=False)
    second = tokenize(TextSet(SECOND), tokenizer, max_length=12, joined=True)
    assert first.second is None and tokens.second is not None
    assert torch.equal(tokens.ids, first.ids) and torch.equal(tokens.second.ids, second.ids)
    assert tokens.widths.tolist() == torch.maximum(first.lengths, second.lengths).tolist()


def test_rows_that_are_cut_are_counted(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = tokenize(PAIRS, tokenizer, max_length=512, joined=True)
    assert whole.truncated == 0
    limit = int(whole.lengths.sort().values[1])  # two rows are longer
    cut = tokenize(PAIRS, tokenizer, max_length=limit, joined=True, name="news train")
    assert f"news train: 2 of {len(PAIRS)} rows are cut to {limit} tokens" in caplog.text
    assert cut.truncated == 2 == int((whole.lengths > limit).sum())
    assert torch.equal(cut.lengths, whole.lengths.clamp(max=limit))


def test_left_padding_tokenizers_are_padded_right(tokenizer: Any) -> None:
    right = tokenize(SINGLE, tokenizer, max_length=64, joined=True)
    tokenizer.padding_side = "left"
    left = tokenize(SINGLE, tokenizer, max_length=64, joined=True)
    rows = torch.arange(4)
    assert torch.equal(left.gather(rows, 64)["input_ids"], right.gather(rows, 64)["input_ids"])


def test_bad_lengths_and_tokenizers_are_one_line(tokenizer: Any) -> None:
    special = tokenizer.num_special_tokens_to_add(pair=True)
    with pytest.raises(
        InputError,
        match=f"max_length, with {special} special tokens, is {special}; give a whole number of at least {special + 1}",
    ):
        tokenize(PAIRS, tokenizer, max_length=special, joined=True)
    tokenizer.pad_token = None
    with pytest.raises(InputError, match="no padding token"):
        tokenize(PAIRS, tokenizer, max_length=9, joined=True)


def test_no_rows_give_no_tokens(tokenizer: Any) -> None:
    assert len(tokenize(SINGLE.subset([]), tokenizer, max_length=9, joined=True)) == 0
    with pytest.raises(InputError, match="row 1 has no token"):
        Tokens.from_rows([[1], []])


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    chosen=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    extra=st.integers(0, 5),
)
def test_gather_equals_a_slow_loop(sizes: list[int], chosen: list[int], extra: int) -> None:
    data = [[10 * row + place for place in range(size)] for row, size in enumerate(sizes)]
    types = [[row % 3] * size for row, size in enumerate(sizes)]
    tokens = Tokens.from_rows(data, types, pad_id=99, pad_type=7)
    rows = [row % len(sizes) for row in chosen]
    width = max(sizes[row] for row in rows) + extra
    batch = tokens.gather(torch.tensor(rows), width)
    for place, row in enumerate(rows):
        fill = width - sizes[row]
        assert batch["input_ids"][place].tolist() == data[row] + [99] * fill
        assert batch["token_type_ids"][place].tolist() == types[row] + [7] * fill
        assert batch["attention_mask"][place].tolist() == [1] * sizes[row] + [0] * fill


def test_a_row_longer_than_the_width_is_refused() -> None:
    tokens = Tokens.from_rows([[1, 2, 3], [4]])
    assert tokens.gather(torch.tensor([1]), 1)["input_ids"].tolist() == [[4]]
    with pytest.raises(InputError, match="a row of 3 tokens does not fit a batch of width 2"):
        tokens.gather(torch.tensor([0, 1]), 2)


def test_widths_are_rounded_up() -> None:
    assert padded_width(torch.tensor([1, 5]), 8) == 8


def test_tokens_move_with_their_pair() -> None:
    tokens = Tokens.from_rows([[1, 2]], [[0, 1]], second=Tokens.from_rows([[3]])).to("meta")
    assert tokens.second is not None
    places = {part.device.type for part in (tokens.ids, tokens.starts, tokens.sizes, tokens.second.ids)}
    assert places == {"meta"} and tokens.lengths.device.type == "cpu"
