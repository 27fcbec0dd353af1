"""The data of the prompts benchmark by name: sentiment sets, sentence pairs, and plain sentences for pseudo labels."""

from __future__ import annotations

from metapretrain.data.made_sentiment import made_plain, made_sentiment
from metapretrain.data.sentence_sets import SentenceData, few_shot_draw, fixed_sample, known_texts, without_known

__all__ = [
    "DOWNSTREAM",
    "PAIRS",
    "PLAIN",
    "PRETRAINING",
    "SentenceData",
    "few_shot_draw",
    "fixed_sample",
    "known_texts",
    "made_plain",
    "made_sentiment",
    "without_known",
]

PRETRAINING = "yelp5"
DOWNSTREAM = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")
PAIRS = ("rte", "mrpc")
PLAIN = ("ptb", "wikitext-2", "dailydialog")
