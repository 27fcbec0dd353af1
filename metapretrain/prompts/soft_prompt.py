"""Rows in front of the embedded text that are learned while the model stays as it is; saved as PEFT adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import number, whole
from metapretrain.draws import torch_generator
from metapretrain.errors import InputError, brief
from metapretrain.files import check_sums, decode, encode, read_json, write_sums, write_whole
from metapretrain.prompts.template import plain_ids

CONFIG, WEIGHTS, OURS = "adapter_config.json", "adapter_model.safetensors", "prompt.json"
KEY = "prompt_embeddings"
# PEFT has no masked language models; its class for features hands the prompt to any model, so to these too.
TASK_TYPES = {"decoder-only": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM", "masked": "FEATURE_EXTRACTION"}


def write_adapter(folder: str | Path, prompt: Tensor, model: Any, kind: str, notes: dict[str, Any]) -> None:
    """Write a prompt (L, D) for `model`, notes to prompt.json; `PeftModel.from_pretrained(model, folder)` loads it."""
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
    files = {
        WEIGHTS: encode({KEY: prompt.detach().cpu().contiguous()}),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        OURS: (json.dumps(notes, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(folder / name, data)
        write_sums(folder, files)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); name another folder") from None


def read_adapter(folder: str | Path) -> Tensor:
    """The prompt (L, D) of a prompt tuning adapter; of one with a second prompt for the decoder, the first."""
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
    length = whole(f"{about}: num_virtual_tokens", config.get("num_virtual_tokens"), 1)
    most = 2 * length if config.get("task_type") == TASK_TYPES["encoder-decoder"] else length
    if prompt is None or prompt.ndim != 2 or not length <= len(prompt) <= most or not prompt.is_floating_point():
        raise InputError(f"{file} does not hold {KEY} of {length} rows, which {CONFIG} names")
    return prompt[:length]


def read_notes(folder: str | Path) -> dict[str, Any]:
    """What stands in prompt.json: template, words and settings."""
    return _json(Path(folder) / OURS)


def _json(file: Path) -> dict[str, Any]:
    check_sums(file.parent)
    if (found := read_json(file)) is None:
        raise InputError(f"{file.parent} has no {file.name}: not a saved prompt")
    return found


class SoftPrompt(nn.Module):
    """A learned prompt of L rows, (L, D), where D is the size of the model's embeddings (Lester et al., 2021).

    `weight`: initial values, finite floating point (L, D) with L, D of at least 1, else an InputError; copied.

    Example:
        >>> SoftPrompt.random(100, 768)
        SoftPrompt(length=100, features=768)
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.numel() or not weight.is_floating_point():
            given = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise InputError(f"a soft prompt is a floating point tensor (length, features), not {given}")
        if bad := int((~weight.isfinite()).any(1).sum()):
            raise InputError(f"{bad} of {len(weight)} rows of the prompt hold NaN or infinity; give another one")
        self.weight = nn.Parameter(weight.detach().clone())

    @property
    def length(self) -> int:
        """Rows, L."""
        return self.weight.shape[0]

    @property
    def features(self) -> int:
        """Numbers in a row, D."""
        return self.weight.shape[1]

    def forward(self) -> Tensor:
        """The prompt (L, D)."""
        return self.weight

    def extra_repr(self) -> str:
        return f"length={self.length}, features={self.features}"

    @classmethod
    def random(cls, length: int, features: int, *, spread: float = 0.5, seed: int = 0) -> SoftPrompt:
        """Uniform in (-spread, spread); 0.5 is that of Lester et al., 2021, section 3.2."""
        whole("length of a soft prompt", length, 1)
        whole("features of a soft prompt", features, 1)
        number("spread of a soft prompt", spread, above=0)
        generator = torch_generator(whole("seed", seed, 0, 2**63 - 1))
        return cls((torch.rand(length, features, generator=generator) * 2 - 1) * spread)

    @classmethod
    def from_vocabulary(
        cls, model: Any, length: Any, *, seed: int = 0, among: Sequence[int] | Tensor | None = None
    ) -> SoftPrompt:
        """The model's embeddings of `length` tokens drawn at random, different ones while there are enough.

        `model` and `length` come in either order; `among`: token ids to draw from, None for the whole vocabulary.
        """
        if isinstance(model, int):
            model, length = length, model
        whole("length of a soft prompt", length, 1)
        table = _table(model)
        count = table.weight.shape[0]
        ids = torch.arange(count) if among is None else _token_ids(among)
        if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= count:
            raise InputError(f"among must hold token ids in 0..{count - 1}, at least one")
        generator = torch_generator(whole("seed", seed, 0, 2**63 - 1))
        rounds = -(-length // len(ids))
        drawn = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(rounds)])[:length]
        return cls(_embedded(table, ids[drawn]))

    @classmethod
    def from_text(cls, model: Any, tokenizer: Any, text: str, length: int | None = None) -> SoftPrompt:
        """The embeddings of the tokens of `text`, of which there must be some, cut or repeated to `length` rows."""
        ids = torch.tensor(plain_ids(tokenizer, [text])[0], dtype=torch.int64)
        if not len(ids):
            raise InputError(f"the text {text!r} has no tokens; a soft prompt needs at least one row")
        length = len(ids) if length is None else length
        whole("length of a soft prompt", length, 1)
        return cls(_embedded(_table(model), ids.repeat(-(-length // len(ids)))[:length]))

    @classmethod
    def from_adapter(cls, folder: str | Path) -> SoftPrompt:
        """The prompt of a PEFT prompt tuning adapter, saved here or by PEFT; see :func:`read_adapter`."""
        return cls(read_adapter(folder))


def _token_ids(given: Any) -> Tensor:
    try:
        ids = torch.as_tensor(given).cpu()
    except (TypeError, ValueError, RuntimeError):
        ids = torch.zeros(())
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise InputError(f"among must be a list of token ids, whole numbers, not {brief(given)}")
    return ids.long()


def _table(model: Any) -> Any:
    if not hasattr(model, "get_input_embeddings"):
        raise InputError(f"give a language model of transformers, not a {type(model).__name__}")
    return model.get_input_embeddings()


@torch.no_grad()
def _embedded(table: Any, ids: Tensor) -> Tensor:
    """The embeddings (L, D) on the CPU as the model sees them: some families scale those of the table."""
    found: Tensor = table(ids.to(table.weight.device)).detach().cpu()
    return found
