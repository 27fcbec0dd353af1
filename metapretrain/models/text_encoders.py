"""Text encoders: token ids in, one pooled embedding for each row out; and heads over embeddings of texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from metapretrain.checks import number, whole
from metapretrain.errors import InputError, one_of
from metapretrain.files import load_tensors, save_tensors, write_sums
from metapretrain.models.hub import expand_mask, load_pretrained, mask_form, quietly, text_source
from metapretrain.models.language_models import tiny_model, tiny_tokenizer
from metapretrain.nests import evaluation_mode


def check_model(model: Any, tokenizer: Any) -> None:
    """Refuse a decoder, and a tokenizer that has no padding, no vocabulary or more tokens than the model."""
    from transformers.models.auto import modeling_auto as auto

    config = model.config
    kind = config.model_type
    decodes = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.is_encoder_decoder or getattr(config, "is_decoder", False) or decodes:
        raise InputError(f"{kind} is no encoder; give one of the kinds of BERT, RoBERTa, DistilBERT or MPNet")
    if tokenizer.pad_token_id is None:
        raise InputError(f"the tokenizer of {kind} has no padding token; set tokenizer.pad_token")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"the tokenizer of {kind} has no vocabulary; save the tokenizer into the model's folder")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise InputError(f"the tokenizer has {len(tokenizer)} tokens, the model {rows}; give the model's own tokenizer")


def longest(model: Any, tokenizer: Any) -> int:
    """Tokens that the model has positions for, at most what its tokenizer was made for."""
    rows = getattr(model.config, "max_position_embeddings", 0) or tokenizer.model_max_length
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        rows -= table.padding_idx + 1  # RoBERTa and MPNet number tokens from after the padding's position
    return int(min(rows, tokenizer.model_max_length))


def check_length(given: int | None, most: int) -> int:
    """The length that was given, from 3 (a word between two special tokens) to `most`, or the most."""
    return most if given is None else whole("max_length", given, 3, most)


_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULE = "sentence_transformers.models."
ACTIVATIONS = {kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.Sigmoid, nn.SiLU)}


class Normalize(nn.Module):
    """Embeddings (B, D) scaled to norm 1, as sentence-transformers does."""

    def forward(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=-1)


class Dense(nn.Module):
    """A linear layer and an activation over embeddings (B, D): the module of that name of sentence-transformers."""

    def __init__(self, features: int, outputs: int, *, bias: bool = True, activation: str = "Tanh") -> None:
        super().__init__()
        self.linear = nn.Linear(features, outputs, bias=bias)
        self.activation: nn.Module = ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)]()

    def forward(self, z: Tensor) -> Tensor:
        found: Tensor = self.activation(self.linear(z))
        return found


class Settings(NamedTuple):
    """What a folder of sentence-transformers says; None where it says nothing."""

    pooling: str | None
    max_length: int | None  # tokens that it takes
    modules: list[nn.Module]  # what follows the pooling


def read_settings(source: str) -> Settings:
    """Read them from a folder or the hub."""
    found = _read(source, "modules.json", list) or []
    if not all(isinstance(about, dict) and {"type", "path"} <= about.keys() for about in found):
        raise InputError(f"modules.json of {source} must name the type and the path of each module")
    kinds = [str(about["type"]).rpartition(".")[2] for about in found]
    known = [("Transformer",), ("Pooling",), *[("Dense", "Normalize")] * len(kinds)]
    wrong = [kind for kind, names in zip(kinds, known, strict=False) if kind not in names]
    if wrong or len(kinds) == 1:
        what = f"the module {wrong[0]}" if wrong else "a Transformer without a Pooling"
        told = f"{source} has {what}, which is not known here"
        raise InputError(f"{told}; known are sentence-transformers' Transformer, Pooling, then Dense and Normalize")
    pooling = _read(source, f"{found[1]['path'] if found else '1_Pooling'}/config.json") or {}
    mode = pooling.get("pooling_mode") or [name for key, name in _MODES.items() if pooling.get(key)]
    if not isinstance(mode, str):
        mode = "+".join(mode) or None
    length = (_read(source, "sentence_bert_config.json") or {}).get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise InputError(f"sentence_bert_config.json of {source}: max_seq_length must be 1 or more, got {length!r}")
    places = [(kind, str(about["path"])) for kind, about in zip(kinds[2:], found[2:], strict=True)]
    return Settings(mode, length, [_dense(source, path) if kind == "Dense" else Normalize() for kind, path in places])


def _dense(source: str, path: str) -> Dense:
    config = _read(source, f"{path}/config.json") or {}
    usual = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    for name, value in (usual | {"use_residual": False}).items():
        if config.get(name, value) not in (value, None):
            raise InputError(f"{path} of {source} has {name}={config[name]!r}, which is not known here")
    sizes: list[Any] = [config.get(name) for name in ("in_features", "out_features")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(f"config.json in {path} of {source} must give in_features and out_features, got {sizes}")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    layer = Dense(*sizes, bias=bool(config.get("bias", True)), activation=activation)
    file = _file(source, f"{path}/model.safetensors")
    if file is None:
        raise InputError(f"{path} of {source} has no model.safetensors; save the model again with safe_serialization")
    try:
        layer.load_state_dict(load_tensors(file))
    except RuntimeError as error:
        raise InputError(f"{file} is not of {path}/config.json: {' '.join(str(error).split())}") from None
    return layer


def save_text_encoder(encoder: TextEncoder, folder: str | Path) -> None:
    """Save model, tokenizer and pooling to a folder that other libraries load and get the same embeddings from.

    `AutoModel.from_pretrained(folder)` gives the states before pooling, `SentenceTransformer(folder)` the embeddings.

    Example:
        >>> import tempfile
        >>> encoder = build_text_encoder("tiny", seed=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_text_encoder(encoder, folder)
        ...     loaded = load_text_encoder(folder)
        >>> torch.equal(loaded.encode(["a text"]), encoder.encode(["a text"]))
        True
    """
    folder, model, tokenizer, kept = Path(folder), encoder.model, encoder.tokenizer, encoder.kept
    writing = folder / ".writing"  # libraries write in pieces: what a killed call has left there is removed by the next
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    with quietly():
        model.save_pretrained(writing, state_dict={**state, **{name: value.cpu() for name, value in kept.items()}})
        tokenizer.save_pretrained(writing)
    places = {"": "Transformer", "1_Pooling": "Pooling"}
    for row, module in enumerate(encoder.tail, start=2):
        kind = type(module).__name__
        places[f"{row}_{kind}"] = kind
        if isinstance(module, Dense):
            layer, activation = module.linear, type(module.activation)
            about: dict[str, Any] = {"in_features": layer.in_features, "out_features": layer.out_features}
            about |= {"bias": layer.bias is not None}
            about["activation_function"] = f"{activation.__module__}.{activation.__qualname__}"
            _write(writing / f"{row}_Dense" / "config.json", about)
            save_tensors(writing / f"{row}_Dense" / "model.safetensors", module.state_dict())
    modules = [
        {"idx": row, "name": str(row), "path": path, "type": _MODULE + kind}
        for row, (path, kind) in enumerate(places.items())
    ]
    pool = {"word_embedding_dimension": model.config.hidden_size}
    _write(writing / "modules.json", modules)
    _write(writing / "sentence_bert_config.json", {"max_seq_length": encoder.max_length, "do_lower_case": False})
    _write(writing / "1_Pooling" / "config.json", pool | {key: name == encoder.pooling for key, name in _MODES.items()})
    write_sums(writing)
    for file in [path for path in writing.rglob("*") if path.is_file()]:
        target = folder / file.relative_to(writing)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)
    shutil.rmtree(writing)


def _file(source: str, file: str) -> Path | None:
    from transformers.utils.hub import cached_file

    if Path(source).is_dir():
        return Path(source) / file if (Path(source) / file).is_file() else None
    kinds = ("missing_entries", "gated_repo", "connection_errors")
    path = cached_file(source, file, **{f"_raise_exceptions_for_{kind}": False for kind in kinds})
    return None if path is None else Path(path)


def _read(source: str, file: str, kind: type = dict) -> Any:
    """What stands in a JSON file, an object or a list; None if there is no file."""
    path = _file(source, file)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise InputError(f"{path} is not a JSON {'object' if kind is dict else 'list'}")
    return content


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


POOLINGS = ("cls", "mean")


class TextEncoder(nn.Module):
    """A transformers encoder whose last states are pooled over the tokens that are not padding.

    Args:
        model: an encoder such as BERT or MPNet; its own pooler is unused, and saved unchanged.
        pooling: `mean` of all tokens' states, or the first token's state (`cls`).
        max_length: tokens a row may have; None: as many as the model takes.
        modules: what follows the pooling: :class:`Dense` and :class:`Normalize` of sentence-transformers.

    Raises InputError: a model that is not an encoder, a tokenizer of another model, or a length that it does not take.
    """

    compilable = True  # the training loop compiles such modules when asked to

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        pooling: str = "mean",
        max_length: int | None = None,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.pooling = one_of("pooling", pooling, POOLINGS)
        check_model(model, tokenizer)
        self.kept: dict[str, Tensor] = {}
        if isinstance(getattr(model, "pooler", None), nn.Module):
            self.kept = {f"pooler.{name}": value.detach().clone() for name, value in model.pooler.state_dict().items()}
            model.pooler = None
        self.model = model
        self.tokenizer = tokenizer
        self.features: int = model.config.hidden_size
        self.tail = nn.Sequential(*modules)
        for layer in (module.linear for module in modules if isinstance(module, Dense)):
            if layer.in_features != self.features:
                raise InputError(f"a Dense module takes {layer.in_features} features, but gets {self.features}")
            self.features = layer.out_features
        self.max_length = check_length(max_length, longest(model, tokenizer))
        self.typed: bool = getattr(model.config, "type_vocab_size", 0) > 1
        self.form = mask_form(model)

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can hold the forward pass; see :func:`metapretrain.models.hub.mask_form`."""
        return self.form != 2

    def forward(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Embeddings float32 (B, D) of int64 (B, L) ids, mask and, if the model has them, types of tokens."""
        z: Tensor = self.tail(self.pool(self.hidden(tokens), tokens["attention_mask"]))
        return z

    def hidden(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """The last states (B, L, D) of all tokens of a padded batch; those of padding mean nothing."""
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        kind = ids.device.type
        mixed = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if mixed else self.model.dtype
        types = {"token_type_ids": tokens["token_type_ids"]} if self.typed and "token_type_ids" in tokens else {}
        states: Tensor = self.model(input_ids=ids, attention_mask=expand_mask(mask, self.form, dtype), **types)[0]
        return states

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """The pooled states (B, D), float32, of states (B, L, D) whose tokens are 1 in `mask` (B, L)."""
        if self.pooling == "cls":
            return states[:, 0].float()
        real = mask.unsqueeze(-1).float()
        return (states.float() * real).sum(1) / real.sum(1).clamp(min=1)

    @torch.no_grad()  # not inference_mode: embeddings may be put into a training of the caller's
    def encode(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], batch_size: int = 64, *, progress: bool = False
    ) -> Tensor:
        """Encode sentences, or pairs joined by the separator, without dropout; `progress` shows a bar.

        Returns float32 (N, D) on the encoder's device, in the order of `texts`; longer ones are cut to `max_length`.
        """
        whole("batch_size", batch_size, 1)
        columns = _columns(texts)
        order = sorted(range(len(texts)), key=lambda row: sum(len(column[row]) for column in columns))
        parts = []
        with evaluation_mode(self):
            for start in tqdm(range(0, len(order), batch_size), "encode", disable=not progress, leave=False):
                rows = order[start : start + batch_size]
                parts.append(self(self._tokens([[column[row] for row in rows] for column in columns])))
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        z = torch.cat(parts)
        return z[back.to(z.device)]

    def network(self) -> tuple[nn.Module, Callable[[Any], Any]]:
        """The encoder itself, and what makes its input of texts, or of pairs joined by the separator."""
        return self, lambda texts: self._tokens(_columns(texts))

    def _tokens(self, columns: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """A padded batch of sentences, or of pairs of two columns, on the encoder's device."""
        how: dict[str, Any] = {"truncation": "longest_first", "max_length": self.max_length, "return_tensors": "pt"}
        device = next(self.parameters()).device
        return {name: value.to(device) for name, value in self.tokenizer(*columns, padding=True, **how).items()}


def build_text_encoder(
    name: str | Path,
    *,
    pooling: str = "auto",
    seed: int = 0,
    dropout: float | None = None,
    max_length: int | None = None,
    modules: bool = True,
) -> TextEncoder:
    """Build a text encoder by name.

    Args:
        name: `tiny` (random by `seed`, no files), `minilm` or `bert-tiny` (weights in an installed package),
            `package:NAME` (any other such package), a folder with `config.json`, or a model of the hub.
        pooling: `mean`, `cls`, or `auto`: what the model was saved with by sentence-transformers, else `mean`.
        dropout: probability in 0..1 everywhere in the model; None keeps the model's own.
        max_length: tokens a row may have; None: as many as the model takes, or was saved with.
        modules: False leaves out what sentence-transformers put behind the pooling (Dense, Normalize).

    Raises InputError: an unknown name or module, a folder without a model, or a dropout or length that it does not
    take.

    Example:
        >>> build_text_encoder("tiny", pooling="cls").encode(["one text", "another"]).shape
        torch.Size([2, 32])
    """
    name = str(name)
    one_of("pooling", pooling, ("auto", *POOLINGS))
    if dropout is not None:
        number("dropout", dropout, least=0, below=1)
    if name == "tiny":
        tokenizer = tiny_tokenizer()
        model = tiny_model(len(tokenizer), seed=seed, dropout=dropout)
        return TextEncoder(model, tokenizer, "mean" if pooling == "auto" else pooling, max_length)
    source = text_source(name)
    model, tokenizer = load_pretrained(source, name, dropout)
    settings = read_settings(source)
    if pooling == "auto":
        pooling = settings.pooling or "mean"
        if pooling not in POOLINGS:
            raise InputError(f"{name} was saved with pooling {pooling!r}; choose one: {', '.join(POOLINGS)}")
    encoder = TextEncoder(model, tokenizer, pooling, max_length, settings.modules if modules else ())
    if max_length is None and settings.max_length:
        encoder.max_length = min(encoder.max_length, settings.max_length)
    return encoder


def load_text_encoder(folder: str | Path) -> TextEncoder:
    """Load what :func:`save_text_encoder` wrote, or any folder that `AutoModel.from_pretrained` takes."""
    if not Path(folder).is_dir():
        raise InputError(f"there is no folder {folder}; give one that save_text_encoder wrote")
    return build_text_encoder(Path(folder).absolute())


def _columns(texts: Sequence[Any]) -> list[list[str]]:
    """One list of sentences, or two for pairs."""
    if isinstance(texts, str) or not hasattr(texts, "__len__") or not len(texts):
        raise InputError(f"texts must be a list of at least one text or pair of texts, got {texts!r}")
    texts = list(texts)  # by position, whatever the index of a pandas Series
    pairs = not isinstance(texts[0], str)
    rows = [tuple(row) if pairs and isinstance(row, tuple | list) else (row,) for row in texts]
    for place, row in enumerate(rows):
        if len(row) != 1 + pairs or not all(isinstance(text, str) for text in row):
            raise InputError(f"texts must be all strings or all pairs of strings; number {place} is {texts[place]!r}")
        try:
            "".join(row).encode()
        except UnicodeEncodeError:
            raise InputError(f"texts must be Unicode; number {place} has half of a character: {row!r}") from None
    return [list(column) for column in zip(*rows, strict=True)]


COMBINES = ("add", "concat", "mult")


class ClassHead(nn.Module):
    """Dropout and one linear layer over embeddings (B, D) of a text or pair: logits (B, C), or scores (B,) if C is 1.

    Source: prototypical pretraining for text, appendix A.1.1, table 3.
    """

    def __init__(self, features: int, outputs: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(features, outputs)

    def forward(self, z: Tensor) -> Tensor:
        return _one_column(self.output(self.dropout(z)))


class PairHead(nn.Module):
    """An MLP over two embeddings: dropout and a linear layer for each, their combination, a linear layer.

    Two embeddings (B, D) become logits (B, C), or scores (B,) with one output. There is no activation.

    Source: prototypical pretraining for text, appendix A.1.1, tables 4 and 5; `add` and `concat`: its poster.
    """

    def __init__(self, features: int, outputs: int = 1, combine: str = "mult", dropout: float = 0.3) -> None:
        super().__init__()
        self.combine = one_of("combination", combine, COMBINES)
        self.dropout = nn.Dropout(dropout)
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)
        self.output = nn.Linear(2 * features if combine == "concat" else features, outputs)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.first(self.dropout(a)), self.second(self.dropout(b))
        z = a * b if self.combine == "mult" else a + b if self.combine == "add" else torch.cat([a, b], dim=-1)
        return _one_column(self.output(z))


def share_hidden(head: PairHead, other: PairHead) -> None:
    """Let `other` use the hidden layers of `head`: one pair of linear layers, trained by both tasks."""
    sizes = head.first.in_features, other.first.in_features
    if sizes[0] != sizes[1]:
        raise InputError(f"heads over {sizes[0]} and {sizes[1]} features cannot share hidden layers; build both alike")
    other.first, other.second = head.first, head.second


class CosineHead(nn.Module):
    """Similarity of embeddings (B, D) as scores (B,): low + (high - low) ReLU(cos(a, b)); it has no parameters.

    Pairs with a negative cosine give no gradient. Source: prototypical pretraining for text, section 4.2.
    """

    def __init__(self, low: float = 0.0, high: float = 5.0) -> None:
        super().__init__()
        if not low < high:
            raise InputError(f"scores must have a range: low {low} is not below high {high}")
        self.low, self.high = low, high

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * F.relu(F.cosine_similarity(a, b, dim=-1))


def _one_column(z: Tensor) -> Tensor:
    return z.squeeze(-1) if z.shape[-1] == 1 else z
