"""Log-probabilities of label words, one way for each kind of language model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metapretrain.prompts.batch import PromptBatch
from metapretrain.prompts.shared import positions, shared_prompt
from metapretrain.prompts.verbalizer import Verbalizer

TAKE_READY_MASKS = ("bert", "camembert", "mt5", "roberta", "t5", "xlm-roberta")


def decoder_only(model: Any, prompts: Tensor, batch: PromptBatch, words: Verbalizer) -> Tensor:
    """The answer is what follows the row: log p(word | prompt, row), (B, C).

    Args:
        prompts: (B, L, D).
        batch: B rows, padded on the right.
    """
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
    """As :func:`decoder_only` for words of one token and rows (K, m) behind prompts (K, L, D); (K, m, C).

    Args:
        model: one that :func:`metapretrain.prompts.shared.can_share`.
    """
    ids, _ = words.padded(batch.answer.device)
    (tasks, rows, width), length = batch.input_ids.shape, prompts.shape[1]
    embeds = model.get_input_embeddings()(batch.input_ids.flatten(1))
    embeds = torch.cat([prompts.to(embeds.dtype), embeds], 1)
    places = batch.answer + length + width * torch.arange(rows, device=ids.device)
    places = torch.where(batch.answer < 0, length - 1, places)  # an empty row is answered behind the prompt itself
    where = positions(length, width, rows, ids.device)
    with shared_prompt(model, length, width), _only_at(model, places) as cut:
        logits = model(inputs_embeds=embeds, position_ids=where, use_cache=False).logits
    at_answers = logits if cut else _gathered(logits, places)
    scores = _of_single(at_answers.flatten(0, 1)[:, None], ids)
    return scores.reshape(tasks, rows, -1)


def encoder_decoder(model: Any, prompts: Tensor, batch: PromptBatch, words: Verbalizer) -> Tensor:
    """The decoder is given the sentinel and answers with what follows it (T5); arguments as :func:`decoder_only`."""
    from transformers.modeling_outputs import BaseModelOutput

    ids, real = words.padded(batch.answer.device)
    embeds, mask = _inputs(model, prompts, batch)
    hidden = model.get_encoder()(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    sentinel = batch.input_ids.gather(1, batch.answer[:, None])
    begin = torch.cat([torch.full_like(sentinel, model.config.decoder_start_token_id), sentinel], 1)
    rows, (classes, longest) = len(batch), ids.shape
    if longest > 1:
        hidden, mask, begin = (t.repeat_interleave(classes, 0) for t in (hidden, mask, begin))
        begin = torch.cat([begin, ids[:, :-1].repeat(rows, 1)], 1)
    encoded = BaseModelOutput(last_hidden_state=hidden)
    logits = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=begin, use_cache=False).logits[:, 1:]
    if longest == 1:
        return _of_single(logits, ids)
    return _of_several(logits, ids.repeat(rows, 1), real.repeat(rows, 1)).reshape(rows, classes)


def masked(model: Any, prompts: Tensor, batch: PromptBatch, words: Verbalizer) -> Tensor:
    """The answer stands at the mask token, or at as many as the word has; arguments as :func:`decoder_only`.

    The tokens of a longer word are scored side by side: none of them is told the others.
    """
    ids, _ = words.padded(batch.answer.device)
    if words.longest == 1:
        return _of_single(_answer_logits(model, prompts, batch, batch.answer[:, None]), ids)
    lengths = [len(tokens) for tokens in words.tokens]
    found: dict[int, Tensor] = {}
    for length in sorted(set(lengths)):
        wider = _more_masks(batch, length)
        places = batch.answer[:, None] + torch.arange(length, device=ids.device)
        log_p = _normalised(_answer_logits(model, prompts, wider, places))
        for label in (label for label, own in enumerate(lengths) if own == length):
            index = ids[label, :length].expand(len(batch), length)[..., None]
            found[label] = log_p.gather(2, index)[..., 0].sum(1)
    return torch.stack([found[label] for label in range(len(words))], 1)


def _more_masks(batch: PromptBatch, length: int) -> PromptBatch:
    extra = length - 1
    to = torch.arange(batch.input_ids.shape[-1] + extra, device=batch.answer.device)
    place = batch.answer[:, None]
    source = torch.where(to <= place, to, torch.where(to <= place + extra, place, to - extra))
    return PromptBatch(batch.input_ids.gather(1, source), batch.attention_mask.gather(1, source), batch.answer)


def _inputs(model: Any, prompts: Tensor, batch: PromptBatch) -> tuple[Tensor, Tensor]:
    """Embeddings (B, L + N, D) with the prompt in front, and the mask of their attention."""
    embeds = model.get_input_embeddings()(batch.input_ids)
    ones = batch.attention_mask.new_ones(prompts.shape[:2])
    mask = torch.cat([ones, batch.attention_mask], 1)
    return torch.cat([prompts.to(embeds.dtype), embeds], 1), _ready(model, mask, embeds)


def _ready(model: Any, mask: Tensor, embeds: Tensor) -> Tensor:
    """What is added to the scores of attention, (B, 1, 1, N), for models that take it.

    Of a mask (B, N) transformers asks whether anything is padding, and waits for the device.
    """
    if model.config.model_type not in TAKE_READY_MASKS:
        return mask
    added = embeds.new_zeros(mask.shape).masked_fill(mask == 0, torch.finfo(embeds.dtype).min)
    return added[:, None, None, :]


def _answer_logits(model: Any, prompts: Tensor, batch: PromptBatch, places: Tensor) -> Tensor:
    """Logits (B, T, V) at the places (B, T) of the rows and nowhere else."""
    embeds, mask = _inputs(model, prompts, batch)
    # Behind the answer of a decoder-only model stands padding alone, which it does not look at: no mask is needed.
    masked_model = "ForMaskedLM" in type(model).__name__
    options: dict[str, Any] = {"attention_mask": mask} if masked_model else {"use_cache": False}
    places = places + prompts.shape[1]
    with _only_at(model, places) as cut:
        logits: Tensor = model(inputs_embeds=embeds, **options).logits
    return logits if cut else _gathered(logits, places)


@contextmanager
def _only_at(model: Any, places: Tensor) -> Iterator[list[bool]]:
    """Let the model's head see only the hidden states at `places`: its vocabulary is the larger part of memory."""
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
        yield cut
    finally:
        if handle is not None:
            handle.remove()


def _gathered(states: Tensor, places: Tensor) -> Tensor:
    return states.gather(1, places[..., None].expand(*places.shape, states.shape[-1]))


def _normalised(logits: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1)


def _of_single(logits: Tensor, ids: Tensor) -> Tensor:
    """(B, C) of logits (B, 1, V) and ids (C, 1)."""
    return _normalised(logits[:, 0])[:, ids[:, 0]]


def _of_several(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Sum over the tokens of a word: (R,) of logits (R, T, V), ids and real (R, T)."""
    each = _normalised(logits).gather(2, ids[..., None])[..., 0]
    return torch.where(real, each, 0).sum(1)
