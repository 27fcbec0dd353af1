"""Embeddings of whole splits equal those of each row alone, in the order of the rows."""

from __future__ import annotations

from typing import Any

import torch

from metapretrain.data.made import made_tasks
from metapretrain.data.tokens import tokenize
from metapretrain.experiments.text.training import embed_tokens
from metapretrain.models.text_encoders import build_text_encoder

ROWS = made_tasks(rows=24)[1].train


def test_rows_keep_their_order_over_batches_of_similar_length() -> None:
    encoder = build_text_encoder("tiny", dropout=0.5).train()
    assert ROWS.second is not None
    pairs = list(zip(ROWS.first, ROWS.second, strict=True))
    both: tuple[tuple[bool, list[Any]], ...] = ((True, [pairs]), (False, [ROWS.first, ROWS.second]))
    for joined, columns in both:
        tokens = tokenize(ROWS, encoder.tokenizer, max_length=64, joined=joined)
        assert not torch.equal(tokens.lengths, tokens.lengths.sort().values)
        found = embed_tokens(encoder, tokens, "cpu", 64, batch_size=5)
        assert encoder.training and len(found) == len(columns)
        for z, column in zip(found, columns, strict=True):
            alone = torch.cat([encoder.encode([text]) for text in column])
            torch.testing.assert_close(z, alone, rtol=1e-4, atol=1e-5)
