"""Prompts as adapters of PEFT: two files that PEFT reads, and one with template and label words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.tensors import decode, encode

CONFIG, WEIGHTS, OURS = "adapter_config.json", "adapter_model.safetensors", "prompt.json"
KEY = "prompt_embeddings"
# PEFT has no masked language models; its class for features hands the prompt to any model, so to these too.
TASK_TYPES = {"decoder-only": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM", "masked": "FEATURE_EXTRACTION"}


def write_adapter(folder: str | Path, prompt: Tensor, model: Any, kind: str, notes: dict[str, Any]) -> None:
    """Write a prompt (L, D) for `model`; `PeftModel.from_pretrained(model, folder)` loads it.

    Args:
        kind: "decoder-only", "encoder-decoder" or "masked".
        notes: what is written to prompt.json; PEFT does not read it.

    Raises:
        InputError: the folder cannot be written.
    """
    folder = Path(folder)
    base = getattr(model.config, "_name_or_path", "") or None
    config = {
        "peft_type": "PROMPT_TUNING",
        "task_type": TASK_TYPES[kind],
        "base_model_name_or_path": None if base is None or Path(base).is_absolute() else base,
        "inference_mode": True,
        "num_virtual_tokens": prompt.shape[0],
        "token_dim": prompt.shape[1],
        "num_transformer_submodules": 1,  # 2, PEFT's default for encoder-decoders, adds rows that it never uses
        "num_attention_heads": getattr(model.config, "num_attention_heads", None),
        "num_layers": getattr(model.config, "num_hidden_layers", None),
        "prompt_tuning_init": "RANDOM",
    }
    weights = {KEY: prompt.detach().cpu().contiguous()}
    files = {
        WEIGHTS: encode(weights),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        OURS: (json.dumps(notes, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            _write(folder / name, data)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); name another folder") from None


def read_adapter(folder: str | Path) -> Tensor:
    """The prompt (L, D) of a prompt tuning adapter.

    Of an adapter with a second prompt for the decoder, which PEFT does not use, the first is read.

    Raises:
        InputError: the folder has no such adapter, or weights that are damaged or not safetensors (a pickle is never
            run).
    """
    about = Path(folder) / CONFIG
    config = _json(about)
    if (kind := config.get("peft_type")) != "PROMPT_TUNING":
        raise InputError(f"{about} is of an adapter of type {kind}; only PROMPT_TUNING can be read")
    file = Path(folder) / WEIGHTS
    if not file.is_file():
        raise InputError(f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True")
    try:
        prompt = decode(file.read_bytes()).get(KEY)
    except InputError as error:
        raise InputError(f"{file} is {error}; save the adapter again") from None
    length = config.get("num_virtual_tokens")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InputError(f"{about}: num_virtual_tokens must be 1 or more, got {length!r}")
    most = 2 * length if config.get("task_type") == TASK_TYPES["encoder-decoder"] else length
    if prompt is None or prompt.ndim != 2 or not length <= len(prompt) <= most or not prompt.is_floating_point():
        raise InputError(f"{file} does not hold {KEY} of {length} rows, which {CONFIG} names")
    return prompt[:length]


def read_notes(folder: str | Path) -> dict[str, Any]:
    """What stands in prompt.json: template, words and settings.

    Raises:
        InputError: there is none.
    """
    return _json(Path(folder) / OURS)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{file.parent} has no {file.name}: not a saved prompt") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file} is not a JSON object")
    return found


def _write(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.part")
    temporary.write_bytes(data)
    os.replace(temporary, file)
