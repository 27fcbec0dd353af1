"""A frozen language model that scores labels, with a prompt for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError, one_of
from metapretrain.prompts import paths
from metapretrain.prompts.adapter import read_notes, write_adapter
from metapretrain.prompts.batch import PromptBatch, check_batch, right_padded
from metapretrain.prompts.shared import can_share
from metapretrain.prompts.template import PromptTemplate
from metapretrain.prompts.verbalizer import Verbalizer

PATHS = {"decoder-only": paths.decoder_only, "encoder-decoder": paths.encoder_decoder, "masked": paths.masked}


class PromptedModel(nn.Module):
    """A language model that classifies by the word it gives for `<X>` (section 3 of Huang et al.).

    The model is put into evaluation mode and takes no gradient; its weights never change.

    Args:
        model: of transformers: AutoModelForCausalLM, AutoModelForSeq2SeqLM or AutoModelForMaskedLM.
        max_length: tokens of a row at most, without the soft prompt.
        normalise: "vocabulary": log-probabilities among all tokens, as in section 3.2; "labels": among the
            label words alone.

    Raises:
        InputError: the model is of no such kind, or a value is not allowed.

    Example:
        >>> from transformers import BertForMaskedLM
        >>> from metapretrain.models.tiny_text import tiny_model, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> bert = BertForMaskedLM(tiny_model(len(tokenizer)).config)
        >>> model = PromptedModel(bert, PromptTemplate("It is <X>."), Verbalizer(["no", "ok"], tokenizer))
        >>> batch = model.encode(["a film", "a plot", "a song"])
        >>> model(torch.zeros(5, 32), batch).shape  # a prompt of 5 rows for all
        torch.Size([3, 2])
        >>> model(torch.zeros(3, 5, 32), batch).shape  # or one for each row
        torch.Size([3, 2])
    """

    def __init__(
        self,
        model: Any,
        template: PromptTemplate,
        verbalizer: Verbalizer,
        *,
        max_length: int = 128,
        normalise: str = "vocabulary",
    ) -> None:
        super().__init__()
        self.kind = kind_of(model)
        for wanted, part in ((PromptTemplate, template), (Verbalizer, verbalizer)):
            if not isinstance(part, wanted):
                raise InputError(f"give a {wanted.__name__}, not a {type(part).__name__}")
        if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
            raise InputError(f"max_length must be an integer of at least 1, not {max_length!r}")
        self.model = model.requires_grad_(False).eval()
        self.template, self.verbalizer = template, verbalizer
        self.normalise = one_of("normalise", normalise, ["labels", "vocabulary"])
        self.tokens, self.features = (int(size) for size in model.get_input_embeddings().weight.shape)
        self.max_length = max_length

    def train(self, mode: bool = True) -> PromptedModel:
        """Set the mode of this wrapper; the model inside stays in evaluation mode."""
        super().train(mode)
        self.model.eval()
        return self

    def encode(
        self, first: Sequence[str], second: Sequence[str] | None = None, labels: Sequence[int] | Tensor | None = None
    ) -> PromptBatch:
        """Tokens, and labels in 0..C-1, of B rows, on the CPU.

        Raises:
            InputError: as :meth:`PromptTemplate.encode`, tokens that the model does not have, or labels that are out
                of range or not one a row.
        """
        width = self.max_length - (self.verbalizer.longest - 1)
        batch = self.template.encode(self.verbalizer.tokenizer, self.kind, first, second, max_length=width)
        if (highest := int(batch.input_ids.max())) >= self.tokens:
            raise InputError(
                f"the tokenizer gives token {highest}, but the model has {self.tokens} tokens; give the model's own"
            )
        if labels is None:
            return batch
        try:
            y = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"labels must be integers in 0..{len(self.verbalizer) - 1}, one a row") from None
        whole = y.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        if y.shape != batch.answer.shape or not whole:
            raise InputError(f"give one integer label for each of {len(batch)} rows, not {y.dtype} {tuple(y.shape)}")
        if int(y.min()) < 0 or int(y.max()) >= len(self.verbalizer):
            raise InputError(
                f"labels lie in {int(y.min())}..{int(y.max())}, but there are words for 0..{len(self.verbalizer) - 1}"
            )
        return PromptBatch(batch.input_ids, batch.attention_mask, batch.answer, y.long(), batch.truncated)

    def forward(self, prompt: Tensor, batch: PromptBatch) -> Tensor:
        """Log-probability of each label's word, (..., C).

        Args:
            prompt: (L, D) for all rows, (0, D) for no prompt; or with the first of the batch's dimensions in front,
                as (K, L, D) for rows (K, m), a prompt a task, or (B, L, D) for rows (B,), a prompt a row.
            batch: rows (...), padded on either side.

        Raises:
            InputError: shapes that do not fit each other or the model.
        """
        self._check(prompt, batch)
        device = self.model.get_input_embeddings().weight.device
        if not prompt.device == batch.answer.device == device:
            raise InputError(
                f"the prompt is on {prompt.device} and the rows on {batch.answer.device}, but the model on {device};"
                " move them with .to(device)"
            )
        shape = batch.shape
        rows = right_padded(batch.flat())
        lead, own = prompt.shape[:-2], prompt.shape[-2:]
        if self.kind == "decoder-only" and self.verbalizer.longest == 1 and can_share(self.model):
            prompts = prompt.reshape(math.prod(lead), *own)
            together = rows.take(torch.arange(len(rows), device=rows.answer.device).reshape(len(prompts), -1))
            scores = paths.shared(self.model, prompts, together, self.verbalizer)
        else:
            each = prompt.reshape(*lead, *(1 for _ in shape[len(lead) :]), *own).expand(*shape, *own)
            scores = PATHS[self.kind](self.model, each.reshape(len(rows), *own), rows, self.verbalizer)
        if self.normalise == "labels":
            scores = scores.log_softmax(-1)
        return scores.reshape(*shape, len(self.verbalizer))

    def losses(self, prompt: Tensor, batch: PromptBatch) -> Tensor:
        """Negative log-probability of each row's label, (...).

        Raises:
            InputError: the batch has no labels.
        """
        if batch.labels is None:
            raise InputError("the batch has no labels; give them to encode")
        scores: Tensor = self(prompt, batch)
        return -scores.gather(-1, batch.labels[..., None])[..., 0]

    @torch.no_grad()
    def classify(
        self, prompt: Tensor, first: Sequence[str], second: Sequence[str] | None = None, *, batch_size: int = 64
    ) -> Tensor:
        """Probabilities among the labels (N, C), on the CPU.

        Args:
            prompt: (L, D), one for all rows.

        Raises:
            InputError: as :meth:`encode` and :meth:`forward`, a prompt that is not finite, or a batch size below 1.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
        data = self.encode(first, second)
        self._check(prompt, data)
        if prompt.ndim != 2:
            raise InputError(f"classify takes one prompt (L, D) for all rows, not {tuple(prompt.shape)}")
        if not bool(prompt.isfinite().all()):
            raise InputError("the prompt holds NaN or infinity; train it again, with a lower learning rate")
        device = self.model.get_input_embeddings().weight.device
        parts = torch.arange(len(data)).split(batch_size)
        scores = [self(prompt.to(device), data.take(rows).trimmed().to(device)).cpu() for rows in parts]
        return torch.cat(scores).softmax(-1)

    def save(self, folder: str | Path, prompt: Tensor) -> None:
        """Write the prompt (L, D) as a PEFT adapter, and template and label words beside it.

        Raises:
            InputError: the prompt is not (L, D) of finite numbers (what stood there before stays), or the folder cannot
                be written.
        """
        fits = isinstance(prompt, Tensor) and prompt.ndim == 2 and len(prompt) and prompt.shape[1] == self.features
        if not fits or not prompt.is_floating_point():
            given = f"{prompt.dtype} {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else type(prompt).__name__
            raise InputError(f"a saved prompt is a tensor of floats (L, {self.features}) with L >= 1, not {given}")
        if not bool(prompt.isfinite().all()):
            raise InputError("the prompt holds NaN or infinity; train it again, with a lower learning rate")
        notes = {
            "template": self.template.text,
            "words": list(self.verbalizer.words),
            "several": self.verbalizer.several,
            "space": self.verbalizer.space,
            "max_length": self.max_length,
            "normalise": self.normalise,
        }
        write_adapter(folder, prompt, self.model, self.kind, notes)

    @classmethod
    def load(cls, folder: str | Path, model: Any, tokenizer: Any) -> PromptedModel:
        """The model with template and label words as they were saved; the prompt is :meth:`SoftPrompt.from_adapter`.

        Raises:
            InputError: the folder was not written by :meth:`save`, or the tokenizer is another one.
        """
        notes = read_notes(folder)
        kind_of(model)
        try:
            words = Verbalizer(notes["words"], tokenizer, several=notes["several"], space=notes["space"])
            options = {"max_length": notes["max_length"], "normalise": notes["normalise"]}
            return cls(model, PromptTemplate(notes["template"]), words, **options)
        except KeyError as error:
            raise InputError(f"prompt.json of {folder} lacks {error}") from None
        except InputError as error:
            raise InputError(f"prompt.json of {folder}: {error}") from None

    def _check(self, prompt: Tensor, batch: PromptBatch) -> None:
        if not isinstance(prompt, Tensor):
            raise InputError(f"a prompt is a tensor (L, D), such as SoftPrompt(...)(), not {type(prompt).__name__}")
        if not prompt.is_floating_point():
            raise InputError(f"a prompt holds floating point numbers, not {prompt.dtype}")
        check_batch("the batch", batch)
        lead, shape = tuple(prompt.shape[:-2]), batch.shape
        if prompt.ndim < 2 or lead != shape[: len(lead)] or prompt.shape[-1] != self.features:
            raise InputError(
                f"prompt {tuple(prompt.shape)} does not fit rows {shape} of a model with {self.features} features;"
                " give (L, D), or the first of the rows' dimensions in front of it"
            )
        most = positions_of(self.model)
        length = prompt.shape[-2] + batch.input_ids.shape[-1] + self.verbalizer.longest - 1
        if most is not None and length > most:
            raise InputError(
                f"{prompt.shape[-2]} prompt rows and {length - prompt.shape[-2]} tokens are more than the model's"
                f" {most} positions; lower max_length or the prompt's length"
            )


def kind_of(model: Any) -> str:
    """ "decoder-only", "encoder-decoder" or "masked".

    Raises:
        InputError: the model has no language modelling head.
    """
    name = type(model).__name__
    if name.endswith("ForMaskedLM"):
        return "masked"
    if hasattr(model, "can_generate") and model.can_generate():
        return "encoder-decoder" if model.config.is_encoder_decoder else "decoder-only"
    raise InputError(
        f"{name} has no language modelling head; load the model with AutoModelForCausalLM, AutoModelForSeq2SeqLM or"
        " AutoModelForMaskedLM"
    )


def positions_of(model: Any) -> int | None:
    """How many positions the model knows; None: any number (relative positions)."""
    most = getattr(model.config, "max_position_embeddings", None)
    embeddings = getattr(getattr(model, model.base_model_prefix, None), "embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)  # RoBERTa counts from behind its padding token's id
    return None if most is None else int(most) - (0 if padding is None else padding + 1)
