"""Models and tokenizers of transformers from a folder or the hub, loaded quietly and checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.models.packages import ALIASES

_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
)


def load_pretrained(source: str, name: str, dropout: float | None) -> tuple[Any, Any]:
    """Load an encoder without a task's head, and its tokenizer; no code of the model's author is run.

    Args:
        source: a folder, or a model of the hub.
        name: what the user called it.
        dropout: probability everywhere in the model; None keeps the model's own.

    Raises:
        InputError: it cannot be loaded, weights are missing, or it has no dropout to set.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    with _quietly():
        try:
            config = AutoConfig.from_pretrained(source)
            _set_dropout(config, name, dropout)
            model, info = AutoModel.from_pretrained(source, config=config, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(source)
        except InputError:
            raise
        except Exception as error:  # transformers, tokenizers and safetensors raise many kinds
            raise _not_loaded(source, name, error) from error
    missing = [key for key in info["missing_keys"] if not key.startswith("pooler.")]
    wrong = [*missing, *(key if isinstance(key, str) else key[0] for key in info["mismatched_keys"])]
    if wrong:
        raise InputError(f"{name} lacks weights of its own model, such as {sorted(wrong)[0]}; save it again")
    if info["missing_keys"]:
        model.pooler = None  # random: not worth keeping
    return model.float(), tokenizer


def _set_dropout(config: Any, name: str, dropout: float | None) -> None:
    if dropout is None:
        return
    found = [attribute for attribute in _DROPOUTS if hasattr(config, attribute)]
    if not found:
        raise InputError(f"{name} has no dropout that could be set to {dropout}; leave dropout out")
    for attribute in found:
        setattr(config, attribute, dropout)


def _not_loaded(source: str, name: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:200]
    if Path(source).is_dir():
        return InputError(f"{name} holds no text encoder that transformers loads: {reason}")
    known = ["tiny", *ALIASES]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(
        f"unknown text encoder {name!r}; {hint}give {', '.join(known)}, package:NAME, a folder with config.json, "
        f"or a model that the hub has: {reason}"
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' report of heads that are not used, and without its progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
