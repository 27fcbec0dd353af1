"""Folders of sentence-transformers: reading how a model pools, writing one that the library loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.models.hub import quietly
from metapretrain.training.weight_sums import write_sums

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.models.Pooling",
}


class Settings(NamedTuple):
    """How a folder of sentence-transformers pools, and the tokens that it takes; None where it does not say."""

    pooling: str | None
    max_length: int | None


def read_settings(source: str) -> Settings:
    """Read them from a folder or the hub; other models have none.

    Raises:
        InputError: a file of settings that is no JSON object, or a length that is none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_settings(folder)
        Settings(pooling=None, max_length=None)
    """
    pooling = _read(source, "1_Pooling/config.json")
    mode = pooling.get("pooling_mode") or [name for key, name in _MODES.items() if pooling.get(key)]
    if not isinstance(mode, str):
        mode = "+".join(mode) or None
    length = _read(source, "sentence_bert_config.json").get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise InputError(f"sentence_bert_config.json of {source}: max_seq_length must be 1 or more, got {length!r}")
    return Settings(mode, length)


def save_folder(
    folder: Path, model: Any, tokenizer: Any, kept: Mapping[str, Tensor], pooling: str, max_length: int
) -> None:
    """Write a folder that `AutoModel`, `AutoTokenizer` and `SentenceTransformer` load.

    Args:
        kept: weights of the model that training left out.
        pooling: `mean` or `cls`.
        max_length: tokens a row may have.
    """
    writing = folder / ".writing"  # libraries write in pieces: what a killed call has left there is removed by the next
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    with quietly():
        model.save_pretrained(writing, state_dict={**state, **{name: value.cpu() for name, value in kept.items()}})
        tokenizer.save_pretrained(writing)
    write_sums(writing)
    modules = [
        {"idx": row, "name": str(row), "path": path, "type": kind} for row, (path, kind) in enumerate(_MODULES.items())
    ]
    pool = {"word_embedding_dimension": model.config.hidden_size}
    _write(writing / "modules.json", modules)
    _write(writing / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write(writing / "1_Pooling" / "config.json", pool | {key: name == pooling for key, name in _MODES.items()})
    for file in [path for path in writing.rglob("*") if path.is_file()]:
        target = folder / file.relative_to(writing)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)
    shutil.rmtree(writing)


def _read(source: str, file: str) -> dict[str, Any]:
    from transformers.utils.hub import cached_file

    if Path(source).is_dir():
        path: str | None = str(Path(source) / file) if (Path(source) / file).is_file() else None
    else:
        path = cached_file(
            source,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object")
    return content


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
