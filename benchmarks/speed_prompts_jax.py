"""An outer step of prompt MAML in plain JAX, over the frozen weights of a T5 or a Llama of transformers.

One jitted function of all tasks (vmap), differentiated twice. Tables of positions are constants, taken from the module;
a Llama's prompt is computed once per task and seen by all of its rows, as ours is. In bf16, products take and give it,
as autocast has it: sums over layers, norms, softmax, turned positions and the loss are in float32, as are the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from speed_contenders import plain_jax

from metapretrain.prompts import PromptBatch, PromptMAML

Weights = dict[str, Any]
Scores = Callable[[Weights, Any, Any, Any], Any]  # logits (m, V) of weights, prompt (L, D), ids (m, N), answers (m,)


def outer_step_of_jax(maml: PromptMAML, bf16: bool = False) -> Callable[[PromptBatch, PromptBatch], tuple[Any, Any]]:
    """The outer loss after one inner step of second order, and its gradient by the prompt, of rows without padding.

    Raises Missing without jax.
    """
    jax, jnp = plain_jax()
    model, words = maml.prompted.model, maml.prompted.verbalizer.padded("cpu")[0][:, 0].numpy()

    def array(tensor: Any) -> Any:
        return jnp.asarray(tensor.detach().cpu().numpy())

    weights = {name: array(p) for name, p in model.named_parameters()}
    scores = {"t5": t5, "llama": llama}[model.config.model_type](jax, jnp, model, array, *casts(jnp, bf16))

    def loss(prompt: Any, weights: Weights, rows: Any) -> Any:
        ids, answers, labels = rows
        found = jax.nn.log_softmax(scores(weights, prompt, ids, answers))[:, words]
        return -jnp.take_along_axis(found, labels[:, None], 1).mean()

    def of_task(prompt: Any, weights: Weights, support: Any, query: Any) -> Any:
        moved = prompt - maml.inner_lr * jax.grad(loss)(prompt, weights, support)
        return loss(moved, weights, query)

    def of_tasks(prompt: Any, weights: Weights, support: Any, query: Any) -> Any:
        return jax.vmap(of_task, in_axes=(None, None, 0, 0))(prompt, weights, support, query).sum()

    step = jax.jit(jax.value_and_grad(of_tasks))

    def whole(support: PromptBatch, query: PromptBatch) -> tuple[Any, Any]:
        parts = [tuple(map(array, (rows.input_ids, rows.answer, rows.labels))) for rows in (support, query)]
        found: tuple[Any, Any] = step(array(maml.prompt.weight), weights, *parts)
        return found

    return whole


def casts(jnp: Any, bf16: bool) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """To the type of products, and to that of all else; without `bf16` both leave what there is."""
    if not bf16:
        return (lambda x: x), (lambda x: x)
    return (lambda x: x.astype(jnp.bfloat16)), (lambda x: x.astype(jnp.float32))


def normaliser(jax: Any, eps: float) -> Callable[[Any, Any], Any]:
    """Root mean square normalisation (Zhang and Sennrich, 2019)."""
    return lambda x, scale: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def t5(jax: Any, jnp: Any, model: Any, array: Callable[[Any], Any], low: Any, wide: Any) -> Scores:
    """T5 of the first version: feed-forward layers of one ReLU, one table for tokens in and out."""
    config, heads = model.config, model.config.num_heads
    norm = normaliser(jax, config.layer_norm_epsilon)
    encoder, decoder = (
        stack.block[0].layer[0].SelfAttention.compute_bias for stack in (model.encoder, model.decoder)
    )  # (1, H, queries, keys) of positions
    first = array(decoder(2, 2)[0])
    causal = jnp.where(jnp.tri(2, dtype=bool), first, jnp.finfo(first.dtype).min)

    def attention(w: Weights, name: str, x: Any, states: Any, bias: Any) -> Any:
        q, k, v = (
            (low(of) @ low(w[f"{name}.{part}.weight"]).T).reshape(*of.shape[:2], heads, -1)
            for part, of in zip("qkv", (x, states, states), strict=True)
        )
        shares = low(jax.nn.softmax(wide(jnp.einsum("mnhd,mkhd->mhnk", q, k)) + bias))
        return jnp.einsum("mhnk,mkhd->mnhd", shares, v).reshape(*x.shape[:2], -1) @ low(w[f"{name}.o.weight"]).T

    def layers(w: Weights, stack: str, count: int, x: Any, bias: Any, states: Any = None) -> Any:
        for number in range(count):
            at = f"{stack}.block.{number}.layer."
            y = norm(x, w[f"{at}0.layer_norm.weight"])
            x, last = x + attention(w, f"{at}0.SelfAttention", y, y, bias), 1
            if states is not None:
                y = norm(x, w[f"{at}1.layer_norm.weight"])
                x, last = x + attention(w, f"{at}1.EncDecAttention", y, states, 0), 2
            y = norm(x, w[f"{at}{last}.layer_norm.weight"])
            dense = f"{at}{last}.DenseReluDense"
            x = x + jnp.maximum(low(y) @ low(w[f"{dense}.wi.weight"]).T, 0) @ low(w[f"{dense}.wo.weight"]).T
        return norm(x, w[f"{stack}.final_layer_norm.weight"])

    def scores(w: Weights, prompt: Any, ids: Any, answers: Any) -> Any:
        table, rows = w["shared.weight"], len(ids)
        x = jnp.concatenate([jnp.broadcast_to(prompt, (rows, *prompt.shape)), table[ids]], 1)
        states = layers(w, "encoder", config.num_layers, x, array(encoder(x.shape[1], x.shape[1])[0]))
        sentinels = jnp.take_along_axis(ids, answers[:, None], 1)
        begin = jnp.concatenate([jnp.full_like(sentinels, config.decoder_start_token_id), sentinels], 1)
        last = layers(w, "decoder", config.num_decoder_layers, table[begin], causal, states)[:, 1]
        return wide(low(last * config.d_model**-0.5) @ low(table).T)

    return scores


def llama(jax: Any, jnp: Any, model: Any, array: Callable[[Any], Any], low: Any, wide: Any) -> Scores:
    """A decoder of rotary positions, grouped heads and gated layers (Touvron et al., 2023); SmolLM2 is one."""
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    norm = normaliser(jax, config.rms_norm_eps)

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        """States (S, H, d), each pair of features turned by the angle of its position."""
        one, other = jnp.split(x, 2, -1)
        return x * cos[:, None] + jnp.concatenate([-other, one], -1) * sin[:, None]

    def attended(q: Any, k: Any, v: Any, seen: Any) -> Any:
        """q (..., N, G, r, d) of r heads per group, k and v (..., M, G, d), seen (N, M)."""
        found = wide(jnp.einsum("...ngrd,...mgd->...grnm", q, k)) * q.shape[-1] ** -0.5
        shares = low(jax.nn.softmax(jnp.where(seen, found, -jnp.inf)))
        return jnp.einsum("...grnm,...mgd->...ngrd", shares, v)

    def scores(w: Weights, prompt: Any, ids: Any, answers: Any) -> Any:
        (rows, width), length = ids.shape, len(prompt)
        table = w["model.embed_tokens.weight"]
        places = torch.cat([torch.arange(length), (torch.arange(width) + length).repeat(rows)])
        rotary, like = model.model.rotary_emb, model.model.embed_tokens.weight
        cos, sin = (array(t[0]) for t in rotary(like, places.to(like.device)[None]))
        causal, seen = jnp.tri(length, dtype=bool), jnp.tri(width, length + width, length, dtype=bool)
        x = jnp.concatenate([prompt, table[ids].reshape(rows * width, -1)])
        for number in range(config.num_hidden_layers):
            at = f"model.layers.{number}."
            y = norm(x, w[f"{at}input_layernorm.weight"])
            q, k, v = (
                (low(y) @ low(w[f"{at}self_attn.{part}_proj.weight"]).T).reshape(len(x), count, -1)
                for part, count in (("q", heads), ("k", groups), ("v", groups))
            )
            q, k = low(turned(q, cos, sin)), low(turned(k, cos, sin))
            q = q.reshape(len(x), groups, heads // groups, -1)
            mine = [part[length:].reshape(rows, width, *part.shape[1:]) for part in (q, k, v)]
            kept = [jnp.broadcast_to(part[:length], (rows, length, *part.shape[1:])) for part in (k, v)]
            keys, values = (jnp.concatenate(pair, 1) for pair in zip(kept, mine[1:], strict=True))
            of_prompt = attended(q[:length], k[:length], v[:length], causal).reshape(length, -1)
            of_rows = attended(mine[0], keys, values, seen).reshape(rows * width, -1)
            x = x + jnp.concatenate([of_prompt, of_rows]) @ low(w[f"{at}self_attn.o_proj.weight"]).T
            y = norm(x, w[f"{at}post_attention_layernorm.weight"])
            gate, up, down = (low(w[f"{at}mlp.{part}_proj.weight"]).T for part in ("gate", "up", "down"))
            x = x + (jax.nn.silu(low(y) @ gate) * (low(y) @ up)) @ down
        last = norm(x[length + width * jnp.arange(rows) + answers], w["model.norm.weight"])
        return wide(low(last) @ low(table).T)

    return scores
