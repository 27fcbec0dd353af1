"""A frozen language model that scores label words, with a prompt for each row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from metapretrain.checks import whole
from metapretrain.errors import InputError, one_of
from metapretrain.prompts.fused import FusedLayers
from metapretrain.prompts.soft_prompt import read_notes, write_adapter
from metapretrain.prompts.template import WHOLE, PromptBatch, PromptTemplate, Verbalizer, check_batch, right_padded

SHARING = ("llama",)  # rotary positions that are given, and attention that is taken from transformers' registry
NAME = "metapretrain_shared_prompt"


@contextmanager
def shared_prompt(model: Any, length: int, width: int) -> Iterator[None]:
    """Within it, `model` takes sequences (K, L + m N): a prompt of `length` L, then m rows of `width` N.

    Each row sees the prompt and itself. It costs N positions instead of L + N, and N x (L + N) pairs of attention
    instead of (L + N)^2; nothing waits for the device. For models of :data:`SHARING`.
    """
    from transformers import AttentionInterface

    config = model.config
    before, config._attn_implementation = config._attn_implementation, NAME
    # Models read the function's name anew in each layer of each pass, so this is the one that they call inside.
    AttentionInterface.register(NAME, _Attention(length, width))
    try:
        yield
    finally:
        config._attn_implementation = before


class _Attention:
    def __init__(self, length: int, width: int) -> None:
        self.length, self.width = length, width
        self.masks: dict[Any, Tensor] = {}

    def __call__(self, _module: Any, query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **given: Any) -> Any:
        """Attention of query (K, H, S, d) to key and value (K, G, S, d) of G groups of heads: (K, S, H, d), None."""
        tasks, rest = len(query), query.shape[2] - self.length
        options: dict[str, Any] = {"scale": given.get("scaling"), "dropout_p": given.get("dropout", 0.0)}
        (q, k, v), parts = zip(*(x.split([self.length, rest], 2) for x in (query, key, value)), strict=True)
        own, *rows = (part.unflatten(2, (-1, self.width)).transpose(1, 2) for part in parts)  # (K, m, H, N, d)
        before = (part[:, None].expand(-1, own.shape[1], -1, -1, -1) for part in (k, v))
        keys, values = (torch.cat(pair, 3).flatten(0, 1) for pair in zip(before, rows, strict=True))
        found = self._causal(own.flatten(0, 1), keys, values, options)
        out: Tensor = found.unflatten(0, (tasks, -1)).transpose(2, 3).flatten(1, 2)  # (K, m N, H, d)
        if not self.length:
            return out, None
        return torch.cat([self._causal(q, k, v, options).transpose(1, 2), out], 1), None

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention of query (B, H, N, d) at the end of key and value (B, G, M, d): each token up to itself.

        The r heads of a group are queries (r N, d) of one head, so that its keys are not copied for each.
        """
        (heads, width), (groups, seen) = query.shape[1:3], key.shape[1:3]
        form = heads // groups, width, seen, query.device, query.dtype
        if (mask := self.masks.get(form)) is None:
            added = query.new_full((width, seen), -torch.inf).triu(seen - width + 1)
            mask = added.repeat(heads // groups, 1)
            if type(mask) is Tensor:  # not while a graph is traced
                self.masks[form] = mask
        together = query.unflatten(1, (groups, -1)).flatten(2, 3)
        found = scaled_dot_product_attention(together, key, value, attn_mask=mask, **options)
        return found.reshape(query.shape)


TAKE_READY_MASKS = ("bert", "camembert", "mt5", "roberta", "t5", "xlm-roberta")


def decoder_only(model: Any, prompts: Tensor, batch: PromptBatch, words: Verbalizer) -> Tensor:
    """Log p(word | prompt, row), (B, C), of what follows each row; prompts (B, L, D), B rows padded on the right."""
    ids, real = words.padded(batch.answer.device)
    if words.longest == 1:
        return _of_single(_answer_logits(model, prompts, batch, batch.answer[:, None]), ids)
    rows, (classes, longest) = len(batch), ids.shape
    places = torch.arange(longest, device=ids.device)
    start = (batch.answer + 1).repeat_interleave(classes)
    width = batch.input_ids.shape[-1]
    tokens = torch.nn.functional.pad(batch.input_ids, (0, longest - 1)).repeat_interleave(classes, 0)
    tokens = tokens.scatter(1, start[:, None] + places[:-1], ids[:, :-1].repeat(rows, 1))
    lengths = start + real.sum(1).repeat(rows) - 1
    mask = (torch.arange(width + longest - 1, device=ids.device) < lengths[:, None]).long()
    longer = PromptBatch(tokens, mask, start - 1)
    logits = _answer_logits(model, prompts.repeat_interleave(classes, 0), longer, longer.answer[:, None] + places)
    return _of_several(logits, ids.repeat(rows, 1), real.repeat(rows, 1)).reshape(rows, classes)


def shared(model: Any, prompts: Tensor, batch: PromptBatch, words: Verbalizer) -> Tensor:
    """As :func:`decoder_only`, (K, m, C), for words of one token, rows (K, m), prompts (K, L, D), if it can share."""
    ids, _ = words.padded(batch.answer.device)
    (tasks, rows, width), length = batch.input_ids.shape, prompts.shape[1]
    embeds = model.get_input_embeddings()(batch.input_ids.flatten(1))
    embeds = torch.cat([prompts.to(embeds.dtype), embeds], 1)
    places = batch.answer + length + width * torch.arange(rows, device=ids.device)
    places = torch.where(batch.answer < 0, length - 1, places)  # an empty row is answered behind the prompt itself
    inside = torch.arange(length + width, device=ids.device)
    where = torch.cat([inside[:length], inside[length:].repeat(rows)])[None]  # each row's behind its prompt
    with shared_prompt(model, length, width):
        logits = _logits_at(model, places, inputs_embeds=embeds, position_ids=where, use_cache=False)
    scores = _of_single(logits.flatten(0, 1)[:, None], ids)
    return scores.reshape(tasks, rows, -1)


def encoder_decoder(model: Any, prompts: Tensor, batch: PromptBatch, words: Verbalizer) -> Tensor:
    """The decoder is given the sentinel and answers with what follows it (T5)."""
    ids, real = words.padded(batch.answer.device)
    embeds, mask = _inputs(model, prompts, batch)
    encoded = model.get_encoder()(inputs_embeds=embeds, attention_mask=mask)
    sentinel = batch.input_ids.gather(1, batch.answer[:, None])
    begin = torch.cat([torch.full_like(sentinel, _start_of(model)), sentinel], 1)
    rows, (classes, longest) = len(batch), ids.shape
    if longest > 1:
        states, mask, begin = (t.repeat_interleave(classes, 0) for t in (encoded.last_hidden_state, mask, begin))
        begin = torch.cat([begin, ids[:, :-1].repeat(rows, 1)], 1)
        encoded.last_hidden_state = states
    given = {"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": begin}
    if model.config.model_type in TAKE_READY_MASKS:  # transformers would make one in a CUDA graph's capture alone
        form, least = (len(begin), 1, begin.shape[1], begin.shape[1]), torch.finfo(embeds.dtype).min
        given["decoder_attention_mask"] = embeds.new_full(form, least).triu(1)
    with _without_keys(model):
        logits = model(**given, use_cache=False).logits[:, 1:]
    if longest == 1:
        return _of_single(logits, ids)
    return _of_several(logits, ids.repeat(rows, 1), real.repeat(rows, 1)).reshape(rows, classes)


@contextmanager
def _without_keys(model: Any) -> Iterator[None]:
    """Within it, T5's decoder attends to the encoder's states by :func:`_attended`, where its layers are plain."""
    parts = model.get_decoder().modules() if model.config.model_type in ("mt5", "t5") else ()
    crossing = [part.EncDecAttention for part in parts if hasattr(part, "EncDecAttention")]
    plain = [of for of in crossing if type(of.k) is type(of.v) is nn.Linear and "forward" not in vars(of)]
    try:
        for attention in plain:
            attention.forward = partial(_attended, attention)
        yield
    finally:
        for attention in plain:
            vars(attention).pop("forward", None)


def _attended(of: Any, x: Tensor, mask: Tensor, key_value_states: Tensor, **_: Any) -> tuple[Tensor, None, None]:
    """Attention of x (B, T, D) to states (B, S, D), with a mask (B, 1, 1, S) that is added to the scores.

    T is small: to move each head's query into the states' D features costs less than a key and a value of each state.
    """
    keys, values = (part.weight.unflatten(0, (of.n_heads, -1)) for part in (of.k, of.v))  # (H, d, D)
    queries = torch.einsum("bthd,hdf->bthf", of.q(x).unflatten(2, (of.n_heads, -1)), keys)
    shares = (queries.flatten(1, 2) @ key_value_states.mT + mask[:, 0]).softmax(-1)  # (B, T H, S)
    seen = (shares @ key_value_states).view_as(queries)
    return of.o(torch.einsum("bthf,hdf->bthd", seen, values).flatten(2)), None, None


def _start_of(model: Any) -> int:
    """The token that the decoder begins with."""
    configs = (model.config, getattr(model, "generation_config", None))
    found = [start for config in configs if (start := getattr(config, "decoder_start_token_id", None)) is not None]
    if not found:
        name = type(model).__name__
        raise InputError(f"the config of {name} lacks decoder_start_token_id; set it to the model's own")
    return int(found[0])


def masked(model: Any, prompts: Tensor, batch: PromptBatch, words: Verbalizer) -> Tensor:
    """The answer stands at the mask, or at as many as the word has tokens, each scored without the others."""
    ids, _ = words.padded(batch.answer.device)
    if words.longest == 1:
        return _of_single(_answer_logits(model, prompts, batch, batch.answer[:, None]), ids)
    lengths = [len(tokens) for tokens in words.tokens]
    found: dict[int, Tensor] = {}
    for length in sorted(set(lengths)):
        place, to = batch.answer[:, None], torch.arange(batch.input_ids.shape[-1] + length - 1, device=ids.device)
        source = torch.where(to <= place, to, torch.where(to < place + length, place, to - length + 1))
        wider = PromptBatch(batch.input_ids.gather(1, source), batch.attention_mask.gather(1, source), batch.answer)
        places = place + torch.arange(length, device=ids.device)
        log_p = _normalised(_answer_logits(model, prompts, wider, places))
        for label in (label for label, own in enumerate(lengths) if own == length):
            index = ids[label, :length].expand(len(batch), length)[..., None]
            found[label] = log_p.gather(2, index)[..., 0].sum(1)
    return torch.stack([found[label] for label in range(len(words))], 1)


def _inputs(model: Any, prompts: Tensor, batch: PromptBatch) -> tuple[Tensor, Tensor]:
    """Embeddings (B, L + N, D) with the prompt in front, and the mask of their attention.

    The mask is (B, L + N), or for models that take it what is added to scores (B, 1, 1, L + N), without a wait.
    """
    embeds = model.get_input_embeddings()(batch.input_ids)
    ones = batch.attention_mask.new_ones(prompts.shape[:2])
    mask = torch.cat([ones, batch.attention_mask], 1)
    if model.config.model_type in TAKE_READY_MASKS:
        added = embeds.new_zeros(mask.shape).masked_fill(mask == 0, torch.finfo(embeds.dtype).min)
        mask = added[:, None, None, :]
    return torch.cat([prompts.to(embeds.dtype), embeds], 1), mask


def _answer_logits(model: Any, prompts: Tensor, batch: PromptBatch, places: Tensor) -> Tensor:
    """Logits (B, T, V) at the places (B, T) of the rows and nowhere else."""
    embeds, mask = _inputs(model, prompts, batch)
    # Behind the answer of a decoder-only model stands padding alone, which it does not look at: no mask is needed.
    masked_model = "ForMaskedLM" in type(model).__name__
    options: dict[str, Any] = {"attention_mask": mask} if masked_model else {"use_cache": False}
    return _logits_at(model, places + prompts.shape[1], inputs_embeds=embeds, **options)


def _logits_at(model: Any, places: Tensor, **inputs: Any) -> Tensor:
    """Logits (B, T, V) at `places`. The head sees no other hidden states: its vocabulary is most of the memory."""
    cut: list[bool] = []

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        cut.append(True)
        if isinstance(output, tuple):
            return (_gathered(output[0], places), *output[1:])
        output.last_hidden_state = _gathered(output.last_hidden_state, places)
        return output

    body = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
    handle = body.register_forward_hook(hook) if body is not None else None
    try:
        logits: Tensor = model(**inputs).logits
    finally:
        if handle is not None:
            handle.remove()
    return logits if cut else _gathered(logits, places)


def _gathered(states: Tensor, places: Tensor) -> Tensor:
    return states.gather(1, places[..., None].expand(*places.shape, states.shape[-1]))


def _normalised(logits: Tensor) -> Tensor:
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def _of_single(logits: Tensor, ids: Tensor) -> Tensor:
    """(B, C) of logits (B, 1, V) and ids (C, 1)."""
    return _normalised(logits[:, 0])[:, ids[:, 0]]


def _of_several(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Sum over the tokens of a word: (R,) of logits (R, T, V), ids and real (R, T)."""
    each = _normalised(logits).gather(2, ids[..., None])[..., 0]
    return torch.where(real, each, 0).sum(1)


PATHS = {"decoder-only": decoder_only, "encoder-decoder": encoder_decoder, "masked": masked}


class PromptedModel(nn.Module):
    """A language model that classifies by the word it gives for `<X>` (section 3 of Huang et al.).

    `model`, a causal, sequence-to-sequence or masked one of transformers, is put into evaluation mode and frozen.
    `max_length`: tokens of a row at most, without the soft prompt. `normalise`: log-probabilities among all tokens
    ("vocabulary", section 3.2) or among the label words ("labels"). `compile`: on a GPU, layers of T5, MT5 and Llama
    run compiled where gradients are asked for: :class:`metapretrain.prompts.fused.FusedLayers` says what that takes.
    Raises InputError: the model is of no such kind, its answers change with padding or are not those of a plain pass
    over the tokens, or a value is not allowed.

    Example:
        >>> from metapretrain.models.language_models import load_language_model
        >>> net, tokenizer = load_language_model("tiny-masked")
        >>> model = PromptedModel(net, PromptTemplate("It is <X>."), Verbalizer(["bad", "good"], tokenizer))
        >>> model(torch.zeros(5, 32), model.encode(["a film", "a plot", "a song"])).shape
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
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.kind = kind_of(model)
        for wanted, part in ((PromptTemplate, template), (Verbalizer, verbalizer)):
            if not isinstance(part, wanted):
                raise InputError(f"give a {wanted.__name__}, not a {type(part).__name__}")
        whole("max_length", max_length, 1)
        self.model = model.requires_grad_(False).eval()
        self.template, self.verbalizer = template, verbalizer
        self.normalise = one_of("normalise", normalise, ["labels", "vocabulary"])
        self.tokens, self.features = (int(size) for size in model.get_input_embeddings().weight.shape)
        self.max_length = max_length
        self.fused: Any = FusedLayers(self.model) if compile else nullcontext
        self._check_answers()

    def train(self, mode: bool = True) -> PromptedModel:
        """Set the mode of this wrapper; the model inside stays in evaluation mode."""
        super().train(mode)
        self.model.eval()
        return self

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Within it, layers run as they are, for a few passes of forms that do not pay to be compiled."""
        fused, self.fused = self.fused, nullcontext
        try:
            yield
        finally:
            self.fused = fused

    def encode(
        self, first: Sequence[str], second: Sequence[str] | None = None, labels: Sequence[int] | Tensor | None = None
    ) -> PromptBatch:
        """Tokens, and labels in 0..C-1, of B rows, on the CPU; raises as :meth:`PromptTemplate.encode`."""
        width = self.max_length - (self.verbalizer.longest - 1)
        batch = self.template.encode(self.verbalizer.tokenizer, self.kind, first, second, max_length=width)
        if (highest := int(batch.input_ids.max())) >= self.tokens:
            told = f"the tokenizer gives token {highest}, but the model has {self.tokens} tokens"
            raise InputError(f"{told}; give the model's own")
        if labels is None:
            return batch
        last = len(self.verbalizer) - 1
        try:
            y = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"labels must be integers in 0..{last}, one a row") from None
        if y.shape != batch.answer.shape or y.dtype not in (torch.uint8, torch.int8, torch.int16, *WHOLE):
            raise InputError(f"give one integer label for each of {len(batch)} rows, not {y.dtype} {tuple(y.shape)}")
        _check_labels(y.cpu(), last)
        return replace(batch, labels=y.long())

    def forward(self, prompt: Tensor, batch: PromptBatch) -> Tensor:
        """Log-probability of each label's word, (..., C), for rows (...), padded on either side.

        `prompt` is (L, D) for all rows, (0, D) for none, (K, L, D) per task of rows (K, m), or (B, L, D) per row.
        """
        self._check(prompt, batch)
        device = self.model.get_input_embeddings().weight.device
        if not prompt.device == batch.answer.device == device:
            told = f"the prompt is on {prompt.device} and the rows on {batch.answer.device}, but the model on {device}"
            raise InputError(f"{told}; move them with .to(device)")
        with self.fused((prompt.shape[-2], batch.input_ids.shape[-1])):  # shared_prompt's
            scores = self._scores(prompt, batch, self.verbalizer)
        return scores.log_softmax(-1) if self.normalise == "labels" else scores

    def _scores(self, prompt: Tensor, batch: PromptBatch, words: Any) -> Tensor:
        shape = batch.shape
        rows = right_padded(batch.flat())
        lead, own = prompt.shape[:-2], prompt.shape[-2:]
        if self.kind == "decoder-only" and words.longest == 1 and self.model.config.model_type in SHARING:
            prompts = prompt.reshape(math.prod(lead), *own)
            together = rows.take(torch.arange(len(rows), device=rows.answer.device).reshape(len(prompts), -1))
            scores = shared(self.model, prompts, together, words)
        else:
            each = prompt.reshape(*lead, *(1 for _ in shape[len(lead) :]), *own).expand(*shape, *own)
            scores = PATHS[self.kind](self.model, each.reshape(len(rows), *own), rows, words)
        return scores.reshape(*shape, -1)

    def losses(self, prompt: Tensor, batch: PromptBatch) -> Tensor:
        """Negative log-probability of each row's label, (...)."""
        if batch.labels is None:
            raise InputError("the batch has no labels; give them to encode")
        scores: Tensor = self(prompt, batch)
        _check_labels(batch.labels, scores.shape[-1] - 1)
        return -scores.gather(-1, batch.labels[..., None])[..., 0]

    @torch.no_grad()
    def classify(
        self, prompt: Tensor, first: Sequence[str], second: Sequence[str] | None = None, *, batch_size: int = 64
    ) -> Tensor:
        """Probabilities among the labels (N, C), on the CPU, under one prompt (L, D) for all rows."""
        whole("batch_size", batch_size, 1)
        data = self.encode(first, second)
        self._check(prompt, data)
        if prompt.ndim != 2:
            raise InputError(f"classify takes one prompt (L, D) for all rows, not {tuple(prompt.shape)}")
        _check_finite(prompt)
        device = self.model.get_input_embeddings().weight.device
        parts = torch.arange(len(data)).split(batch_size)
        scores = [self(prompt.to(device), data.take(rows).trimmed().to(device)).cpu() for rows in parts]
        return torch.cat(scores).softmax(-1)

    def save(self, folder: str | Path, prompt: Tensor) -> None:
        """Write the prompt (L, D), finite, as a PEFT adapter, and template and label words beside it."""
        fits = isinstance(prompt, Tensor) and prompt.ndim == 2 and len(prompt) and prompt.shape[1] == self.features
        if not fits or not prompt.is_floating_point():
            given = f"{prompt.dtype} {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else type(prompt).__name__
            raise InputError(f"a saved prompt is a tensor of floats (L, {self.features}) with L >= 1, not {given}")
        _check_finite(prompt)
        words = self.verbalizer
        notes = {"template": self.template.text, "words": list(words.words), "several": words.several}
        notes |= {"space": words.space, "max_length": self.max_length, "normalise": self.normalise}
        write_adapter(folder, prompt, self.model, self.kind, notes)

    @classmethod
    def load(cls, folder: str | Path, model: Any, tokenizer: Any) -> PromptedModel:
        """The model with the template and words of :meth:`save`; the prompt is :meth:`SoftPrompt.from_adapter`."""
        notes = read_notes(folder)
        kind_of(model)
        try:
            words = Verbalizer(notes["words"], tokenizer, several=notes["several"], space=notes["space"])
            options = {name: notes[name] for name in ("max_length", "normalise")}
            return cls(model, PromptTemplate(notes["template"]), words, **options)
        except KeyError as error:
            raise InputError(f"prompt.json of {folder} lacks {error}") from None
        except InputError as error:
            raise InputError(f"prompt.json of {folder}: {error}") from None

    @torch.no_grad()
    def _check_answers(self) -> None:
        """Refuse a model whose answers change with padding, or are not those of a plain pass over the tokens."""
        table = self.model.get_input_embeddings()
        device = table.weight.device
        padding = getattr(self.model.config, "pad_token_id", None)
        own = [token % self.tokens for token in range(4, 16) if token != padding]
        tokens = torch.tensor([own[:2], own[2:4], own[4:6], own[6:8]], device=device)
        start, word, ids = tokens[0], tokens[1][:, None], torch.cat([tokens[2:], tokens[2:].flip(0)], 1)
        lengths = torch.tensor([2, 4], device=device)
        mask = (torch.arange(4, device=device) < lengths[:, None]).long()
        words = SimpleNamespace(longest=1, tokens=word.tolist(), padded=lambda _: (word, word >= 0))
        try:
            plain = [self._plain(torch.cat([start, row[:length]])) for row, length in zip(ids, (2, 4), strict=True)]
            found = [
                self._scores(table(start), PromptBatch(given, mask, lengths - 1), words)
                for given in (ids, ids.where(mask == 1, own[8]))
            ]
        except InputError:
            raise
        except Exception as error:  # each family of transformers raises its own
            raise _unfit(self.model, f"cannot be given a soft prompt ({' '.join(str(error).split())[:200]})") from error
        wanted = torch.stack(plain)[:, tokens[1]].to(found[0])
        exact = table.weight.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(device.type)
        exact = exact and torch.get_float32_matmul_precision() == "highest"
        same, near = (1e-5, 1e-3) if exact else (0.1, 0.1)  # other padding has the same shape; a plain pass has not
        alike = torch.allclose(found[0], found[1], rtol=0, atol=same, equal_nan=True)
        if not (alike and torch.allclose(found[0], wanted, rtol=0, atol=near, equal_nan=True)):
            raise _unfit(self.model, "gives answers that change with padding or are not those of a plain pass over it")

    def _plain(self, ids: Tensor) -> Tensor:
        """Log-probabilities (V,) of the answer behind, or at, the last of some tokens (N,), by the model alone."""
        given = {"input_ids": ids[None]}
        if self.kind == "encoder-decoder":
            given["decoder_input_ids"] = torch.stack([torch.full_like(ids[-1], _start_of(self.model)), ids[-1]])[None]
        return _normalised(self.model(**given).logits[0, -1])

    def _check(self, prompt: Tensor, batch: PromptBatch) -> None:
        if not isinstance(prompt, Tensor):
            raise InputError(f"a prompt is a tensor (L, D), such as SoftPrompt(...)(), not {type(prompt).__name__}")
        if not prompt.is_floating_point():
            raise InputError(f"a prompt holds floating point numbers, not {prompt.dtype}")
        check_batch("the batch", batch)
        lead, shape = tuple(prompt.shape[:-2]), batch.shape
        if prompt.ndim < 2 or lead != shape[: len(lead)] or prompt.shape[-1] != self.features:
            told = f"prompt {tuple(prompt.shape)} does not fit rows {shape} of a model with {self.features} features"
            raise InputError(f"{told}; give (L, D), or the first of the rows' dimensions in front of it")
        most = positions_of(self.model)
        length = prompt.shape[-2] + batch.input_ids.shape[-1] + self.verbalizer.longest - 1
        if most is not None and length > most:
            rows = prompt.shape[-2]
            told = f"{rows} prompt rows and {length - rows} tokens are more than the model's {most} positions"
            raise InputError(f"{told}; lower max_length or the prompt's length")


def _unfit(model: Any, what: str) -> InputError:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    name, kind = type(model).__name__, model.config.model_type
    advice = "use a model of another kind, such as GPT-2, Llama, T5 or BERT"
    if not getattr(model.config, "is_decoder", True) and kind in MASKED and MASKED[kind] != name:
        advice = "load it with is_decoder=True, or with AutoModelForMaskedLM"
    return InputError(f"{name} {what}; {advice}")


def _check_labels(y: Tensor, last: int) -> None:
    if y.is_cpu and not 0 <= int(y.min()) <= int(y.max()) <= last:  # reading them on a GPU would wait for it
        raise InputError(f"labels lie in {int(y.min())}..{int(y.max())}, but there are words for 0..{last}")


def _check_finite(prompt: Tensor) -> None:
    if not bool(prompt.isfinite().all()):
        raise InputError("the prompt holds NaN or infinity; train it again, with a lower learning rate")


def kind_of(model: Any) -> str:
    """Whether a model is "decoder-only", "encoder-decoder" or "masked"; InputError if it has no such head."""
    name = type(model).__name__
    if name.endswith("ForMaskedLM"):
        return "masked"
    if hasattr(model, "can_generate") and model.can_generate():
        return "encoder-decoder" if model.config.is_encoder_decoder else "decoder-only"
    heads = "AutoModelForCausalLM, AutoModelForSeq2SeqLM or AutoModelForMaskedLM"
    raise InputError(f"{name} has no language modelling head; load the model with {heads}")


def positions_of(model: Any) -> int | None:
    """How many positions the model knows; None: any number (relative positions)."""
    most = getattr(model.config, "max_position_embeddings", None)
    embeddings = getattr(getattr(model, model.base_model_prefix, None), "embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)  # RoBERTa counts from behind its padding token's id
    return None if most is None else int(most) - (0 if padding is None else padding + 1)
