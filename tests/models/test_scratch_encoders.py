"""BERT from scratch: its tokenizer is that of transformers, pieces are the texts', weights the seed's alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scratch_encoders import Encoders, make_tokenizer, word_pieces
from transformers import AutoTokenizer

from metapretrain.errors import InputError
from metapretrain.models.language_models import SPECIAL, random_bert, wordpiece_tokenizer


def test_word_pieces_depend_on_the_texts_alone() -> None:
    texts = ["Paris is in France .", "The cat sat in Paris .", "France sat ."] * 2
    assert word_pieces(texts, 60) == word_pieces(texts[::-1], 60)
    tokenizer = make_tokenizer(texts, 60, max_length=32)
    ids = tokenizer("The cat in Paris", "Paris sat")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The cat in Paris Paris sat"
    assert len(tokenizer) <= 60 and tokenizer.mask_token_id == 4
    scratch = Encoders("mini", texts, max_length=32)
    with pytest.raises(InputError, match="256"):
        Encoders("tiny", max_length=272)
    first, second, other = (scratch(seed).state_dict() for seed in (1, 1, 2))
    key = "model.embeddings.word_embeddings.weight"
    assert torch.equal(first[key], second[key]) and not torch.equal(first[key], other[key])


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_of_pieces_is_berts(lowercase: bool, tmp_path: Path) -> None:
    pieces = ["the", "The", "caf", "##e", "##\u00e9", ".", *SPECIAL, "cat", "##s"]  # special pieces need not come first
    (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path, do_lower_case=lowercase, model_max_length=9)
    ours = wordpiece_tokenizer(pieces, max_length=9, lowercase=lowercase)
    for pair in (("The cats, the caf\u00e9.", None), ("the cat.", "The CATS the cat."), ("", None)):
        expected, found = (tokenizer(*pair, truncation=True) for tokenizer in (theirs, ours))
        assert dict(found) == dict(expected)
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_random_weights_are_the_seeds_and_leave_the_global_state() -> None:
    sizes = {"layers": 1, "features": 8, "heads": 2, "hidden": 16, "positions": 8}
    before = torch.get_rng_state()
    first, second, other = (random_bert(20, **sizes, seed=seed, dropout=0.0).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    key = "embeddings.word_embeddings.weight"
    assert torch.equal(first[key], second[key]) and not torch.equal(first[key], other[key])
