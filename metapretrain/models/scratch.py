"""Text models with random weights and word pieces of given texts, without any file."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece_tokenizer(pieces: Iterable[str], *, max_length: int, lowercase: bool = True) -> Any:
    """A BERT tokenizer of transformers with these word pieces.

    Args:
        pieces: in the order of their ids; the five of :data:`SPECIAL` are among them, `##` begins one inside a word.
        lowercase: also take the accents away.

    Example:
        >>> wordpiece_tokenizer([*SPECIAL, "a", "test", "##s"], max_length=8).tokenize("A tests")
        ['a', 'test', '##s']
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {piece: row for row, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name[1:-1].lower()}_token": name for name in SPECIAL},
    )


def random_bert(
    vocabulary: int, *, layers: int, features: int, heads: int, hidden: int, positions: int, seed: int, dropout: float
) -> Any:
    """A BertModel with random weights; the global random state is left alone.

    Args:
        hidden: width of the feed-forward part.
        positions: tokens of a sequence at most.

    Example:
        >>> sizes = {"layers": 1, "features": 8, "heads": 2, "hidden": 16, "positions": 8}
        >>> random_bert(100, **sizes, seed=0, dropout=0.1).config.hidden_size
        8
    """
    from transformers import BertConfig, BertModel

    from metapretrain.draws import seeded

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=features,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=hidden,
        max_position_embeddings=positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with seeded(seed):
        return BertModel(config)


_POSITIONS = 256


def tiny_tokenizer() -> Any:
    """A BERT tokenizer whose pieces are pairs of letters and single ASCII characters; nothing is downloaded.

    Example:
        >>> tiny_tokenizer().tokenize("A tiny test.")
        ['a', 'ti', '##ny', 'te', '##st', '.']
    """
    letters = string.ascii_lowercase
    inside = [*letters, *string.digits, *(a + b for a in letters for b in letters)]
    pieces = [*SPECIAL, *string.punctuation, *inside, *(f"##{piece}" for piece in inside)]
    return wordpiece_tokenizer(pieces, max_length=_POSITIONS)


def tiny_model(vocabulary: int, *, seed: int = 0, dropout: float | None = None) -> Any:
    """BERT of 2 layers and 32 features with random weights; the global random state is left alone.

    Example:
        >>> tiny_model(100).config.hidden_size
        32
    """
    rate = 0.1 if dropout is None else dropout
    return random_bert(
        vocabulary, layers=2, features=32, heads=2, hidden=64, positions=_POSITIONS, seed=seed, dropout=rate
    )
