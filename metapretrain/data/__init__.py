"""Readers of image and text data sets, one registry of them, batch augmentation and cached tokens.

Data that is missing or cannot be used is an InputError of one line that names file and place.
"""

from metapretrain.data.made import made_sentiment, made_tasks
from metapretrain.data.registry import (
    DATASETS,
    DatasetInfo,
    load_few_shot,
    load_images,
    load_plain,
    load_sentiment,
    load_text_tasks,
    register,
)
from metapretrain.data.tables import from_dataset, read_texts
from metapretrain.data.texts import SentenceData, TextSet, TextTask, hold_out

__all__ = ["DATASETS", "DatasetInfo", "SentenceData", "TextSet", "TextTask", "from_dataset", "hold_out"]
__all__ += ["load_few_shot", "load_images", "load_plain", "load_sentiment", "load_text_tasks", "made_sentiment"]
__all__ += ["made_tasks", "read_texts", "register"]
