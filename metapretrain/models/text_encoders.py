"""Text encoders: token ids in, one pooled embedding for each row out; any BERT-like model of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError, one_of
from metapretrain.models.attention_masks import expand_mask, mask_form
from metapretrain.models.hub import load_pretrained
from metapretrain.models.packages import ALIASES, package_folder
from metapretrain.models.sentence_export import read_settings, save_folder
from metapretrain.models.text_checks import check_length, check_model, longest
from metapretrain.models.tiny_text import tiny_model, tiny_tokenizer
from metapretrain.paths import user_path

POOLINGS = ("cls", "mean")


class TextEncoder(nn.Module):
    """A transformers encoder whose last states are pooled over the tokens that are not padding.

    Args:
        model: an encoder such as BERT, RoBERTa, DistilBERT or MPNet. Its own pooler is taken out: no pooling here uses
            it; :func:`save_text_encoder` writes it unchanged.
        tokenizer: of the same model.
        pooling: `mean` of all tokens' states, or the first token's state (`cls`).
        max_length: tokens a row may have; None: as many as the model takes.

    Attributes:
        features: D.
        max_length: tokens a row may have.
        recordable: whether an update can be recorded as a CUDA graph; see
            :func:`metapretrain.models.attention_masks.mask_form`.

    Raises:
        InputError: unknown pooling, a model that is not an encoder, a tokenizer of another model or without padding,
            or a length that the model does not take.

    Example:
        >>> encoder = build_text_encoder("tiny")
        >>> tokens = encoder.tokenizer(["a text", "a longer text"], padding=True, return_tensors="pt")
        >>> encoder(tokens).shape == (2, encoder.features)
        True
    """

    compilable = True  # the training loop compiles such modules when asked to

    def __init__(self, model: Any, tokenizer: Any, pooling: str = "mean", max_length: int | None = None) -> None:
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
        self.max_length = check_length(max_length, longest(model, tokenizer))
        self.typed: bool = getattr(model.config, "type_vocab_size", 0) > 1
        self.form = mask_form(model)

    @property
    def recordable(self) -> bool:
        """Whether the forward pass never waits for the device, so that a CUDA graph can hold it."""
        return self.form != 2

    def forward(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Encode a padded batch.

        Args:
            tokens: `input_ids` and `attention_mask`, int64 (B, L); `token_type_ids`, too, for models that have types.

        Returns:
            (B, D), float32 under mixed precision as well.
        """
        return self.pool(self.hidden(tokens), tokens["attention_mask"])

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
        """One embedding (B, D), float32, of states (B, L, D) whose tokens are 1 in `mask` (B, L)."""
        if self.pooling == "cls":
            return states[:, 0].float()
        real = mask.unsqueeze(-1).float()
        return (states.float() * real).sum(1) / real.sum(1).clamp(min=1)

    @torch.no_grad()  # not inference_mode: embeddings may be put into a training of the caller's
    def encode(self, texts: Sequence[str] | Sequence[tuple[str, str]], batch_size: int = 64) -> Tensor:
        """Encode sentences, or pairs of sentences joined by the separator, without dropout.

        Returns:
            float32 (N, D) on the encoder's device, in the order of `texts`; longer ones are cut to `max_length`.

        Raises:
            InputError: no text, texts that are neither strings nor pairs, or a batch size below 1.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        columns = _columns(texts)
        order = sorted(range(len(texts)), key=lambda row: sum(len(column[row]) for column in columns))
        device = next(self.parameters()).device
        training = self.training
        self.eval()
        try:
            parts = []
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = self.tokenizer(
                    *([column[row] for row in rows] for column in columns),
                    padding=True,
                    truncation="longest_first",
                    max_length=self.max_length,
                    return_tensors="pt",
                )
                parts.append(self({name: value.to(device) for name, value in batch.items()}))
        finally:
            self.train(training)
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(parts)[back.to(device)]


def build_text_encoder(
    name: str | Path,
    *,
    pooling: str = "auto",
    seed: int = 0,
    dropout: float | None = None,
    max_length: int | None = None,
) -> TextEncoder:
    """Build a text encoder by name.

    Args:
        name: `tiny` (random weights, no files), `minilm` or `bert-tiny` (weights in an installed package),
            `package:NAME` (any other such package), a folder with `config.json`, or a model of the hub.
        pooling: `mean`, `cls`, or `auto`: what the model was saved with by sentence-transformers, else `mean`.
        seed: of the weights of `tiny`.
        dropout: probability in 0..1 everywhere in the model; None keeps the model's own.
        max_length: tokens a row may have; None: as many as the model takes, or was saved with.

    Raises:
        InputError: unknown name or pooling, a package that is not installed, a folder without a model, or a dropout
            or length that the model does not take.

    Example:
        >>> build_text_encoder("tiny", pooling="cls").encode(["one text", "another"]).shape
        torch.Size([2, 32])
    """
    name = str(name)
    one_of("pooling", pooling, ("auto", *POOLINGS))
    if dropout is not None and not 0 <= dropout < 1:
        raise InputError(f"dropout must be at least 0 and below 1, got {dropout}")
    if name == "tiny":
        tokenizer = tiny_tokenizer()
        model = tiny_model(len(tokenizer), seed=seed, dropout=dropout)
        return TextEncoder(model, tokenizer, "mean" if pooling == "auto" else pooling, max_length)
    source = _source(name)
    model, tokenizer = load_pretrained(source, name, dropout)
    settings = read_settings(source)
    if pooling == "auto":
        pooling = settings.pooling or "mean"
        if pooling not in POOLINGS:
            raise InputError(f"{name} was saved with pooling {pooling!r}; choose one: {', '.join(POOLINGS)}")
    encoder = TextEncoder(model, tokenizer, pooling, max_length)
    if max_length is None and settings.max_length:
        encoder.max_length = min(encoder.max_length, settings.max_length)
    return encoder


def save_text_encoder(encoder: TextEncoder, folder: str | Path) -> None:
    """Save model, tokenizer and pooling to a folder that other libraries load and get the same embeddings from.

    `AutoModel` and `AutoTokenizer.from_pretrained(folder)` give the states before pooling,
    `SentenceTransformer(folder)` and :func:`load_text_encoder` the embeddings.

    Example:
        >>> import tempfile
        >>> encoder = build_text_encoder("tiny", seed=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_text_encoder(encoder, folder)
        ...     loaded = load_text_encoder(folder)
        >>> torch.equal(loaded.encode(["a text"]), encoder.encode(["a text"]))
        True
    """
    save_folder(Path(folder), encoder.model, encoder.tokenizer, encoder.kept, encoder.pooling, encoder.max_length)


def load_text_encoder(folder: str | Path) -> TextEncoder:
    """Load what :func:`save_text_encoder` wrote, or any folder that `AutoModel.from_pretrained` takes.

    Raises:
        InputError: there is no such folder or no model in it.
    """
    if not Path(folder).is_dir():
        raise InputError(f"there is no folder {folder}; give one that save_text_encoder wrote")
    return build_text_encoder(Path(folder).absolute())


def _source(name: str) -> str:
    """The folder or hub name that `name` stands for."""
    if not name.removeprefix("package:").strip():
        raise InputError(f"no text encoder is named {name!r}; give tiny, minilm, bert-tiny, package:NAME or a folder")
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
    return name


def _columns(texts: Sequence[Any]) -> list[list[str]]:
    """One list of sentences, or two for pairs."""
    if isinstance(texts, str) or not hasattr(texts, "__len__") or not len(texts):
        raise InputError(f"texts must be a list of at least one text or pair of texts, got {texts!r}")
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
