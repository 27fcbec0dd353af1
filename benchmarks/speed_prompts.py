"""Rows of run_speed.py about prompts: an outer step of prompt MAML with all tasks in one pass, and task by task."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock, wait
from torch.nn.attention import SDPBackend, sdpa_kernel

from metapretrain.models.language_models import tiny_word_tokenizer
from metapretrain.prompts import OuterStep, PromptBatch, PromptMAML, PromptTemplate, SoftPrompt, Verbalizer
from metapretrain.prompts.fused import FusedLayers

WORDS = ("terrible", "bad", "maybe", "good", "great")
RATE = 0.08
BEFORE_REPLAY = 3  # calls of an OuterStep, the last of which records it


@dataclass(frozen=True)
class PromptWork:
    """K tasks of m support and m query rows of `width` tokens, behind a prompt of `length` rows; random weights.

    `layers` and `features` are those of the model; a small one stands in for it where there is no GPU.
    """

    kind: str
    layers: int
    features: int
    heads: int
    inner: int
    vocabulary: int
    tasks: int = 10
    shots: int = 4
    length: int = 100
    width: int = 128

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        if self.kind == "t5":
            config = T5Config(
                vocab_size=self.vocabulary,
                d_model=self.features,
                d_kv=self.features // self.heads,
                d_ff=self.inner,
                num_layers=self.layers,
                num_heads=self.heads,
            )
            config.decoder_start_token_id = 0
            return T5ForConditionalGeneration(config)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.features,
                intermediate_size=self.inner,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=max(1, self.heads // 3),
                max_position_embeddings=2048,
                tie_word_embeddings=True,
            )
        )

    def rows(self, seed: int, device: str) -> PromptBatch:
        """Rows (K, m) of random tokens."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.tasks, self.shots)
        ids = torch.randint(10, 700, (*shape, self.width), generator=generator)
        labels = torch.randint(len(WORDS), shape, generator=generator)
        batch = PromptBatch(ids, torch.ones_like(ids), torch.full(shape, self.width - 1), labels)
        return batch.to(device)

    def learner(self, device: str, dtype: torch.dtype, chunk: int | None) -> PromptMAML:
        prompt = SoftPrompt(SoftPrompt.random(self.length, self.features).weight.detach().to(dtype)).to(device)
        words = Verbalizer(WORDS, tiny_word_tokenizer())
        model = self.model().to(device, dtype)
        return PromptMAML(model, prompt, PromptTemplate("It was <X>."), words, inner_lr=RATE, chunk=chunk)


Context = Callable[[], AbstractContextManager[Any]]
Step = Callable[[PromptBatch, PromptBatch], Any]


def in_one_pass(maml: PromptMAML, context: Context) -> Step:
    """Ours: :meth:`PromptMAML.backward`."""

    def step(support: PromptBatch, query: PromptBatch) -> None:
        with context():
            maml.backward(support, query)

    return step


def task_by_task(maml: PromptMAML, context: Context) -> Step:
    """Algorithm 1 as it is written down."""
    prompt, model = maml.prompt.weight, maml.prompted

    def step(support: PromptBatch, query: PromptBatch) -> None:
        for task in range(len(support)):
            mine, other = (part.take(torch.tensor(task, device=part.answer.device)) for part in (support, query))
            with context(), sdpa_kernel(SDPBackend.MATH):  # the only one that can be differentiated twice
                (gradient,) = torch.autograd.grad(model.losses(prompt, mine).mean(), prompt, create_graph=True)
            with context():
                loss = model.losses(prompt - RATE * gradient, other).mean()
            loss.backward()

    return step


def compiled(maml: PromptMAML, context: Context) -> Step:
    """Ours with the model's layers fused, each with its two derivatives."""
    maml.prompted.fused = FusedLayers(maml.prompted.model)
    return OuterStep(maml, context)


def by_jax(maml: PromptMAML, context: Context) -> Step:
    """One jitted function of JAX, in which all tasks are mapped (vmap); products in bf16 if there is a context."""
    from speed_prompts_jax import outer_step_of_jax

    return outer_step_of_jax(maml, bf16=context is not nullcontext)


PEERS = (task_by_task, by_jax)
Way = Callable[[PromptMAML, Context], Step]
RECORDED: tuple[Way, ...] = (OuterStep, compiled)


def gradient_of(work: PromptWork, device: str, way: Way, chunk: int | None) -> Any:
    """The gradient of the prompt (L, D) by an outer step in float64."""
    gc.collect()  # a graph of the one before would be kept beside this one
    torch.cuda.empty_cache()
    maml = work.learner(device, torch.float64, chunk)
    step = way(maml, nullcontext)
    for _ in range(BEFORE_REPLAY + 1 if way in RECORDED else 1):
        maml.zero_grad()
        found = step(work.rows(1, device), work.rows(2, device))
    if isinstance(found, tuple):  # of JAX
        return torch.tensor(found[1].__array__()).to(device)
    return maml.prompt.weight.grad


def outer_steps(work: PromptWork) -> list[Contender]:
    """Contenders of one piece of work; float32 without TF32 but for those that say bf16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    peaks: dict[str, float] = {}

    def timed(name: str, way: Way, chunk: int | None, context: Context) -> Callable[[int], None]:
        if device == "cpu" and (way in RECORDED or context is not nullcontext):
            raise Missing("a GPU")
        others = torch.cuda.memory_allocated() if device == "cuda" else 0  # what the contenders before this one hold
        maml = work.learner(device, torch.float32, chunk)
        support, query = work.rows(1, device), work.rows(2, device)
        step = way(maml, context)

        def steps(n: int) -> None:
            for _ in range(n):
                maml.zero_grad()
                found = step(support, query)
            if isinstance(found, tuple):  # of JAX
                found[0].block_until_ready()
            wait()

        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps(BEFORE_REPLAY if way in RECORDED else 1)
        if device == "cuda" and way is not by_jax:  # now, since what a graph needs is not counted when it is replayed
            peaks[name] = (torch.cuda.max_memory_allocated() - others) / 2**30
        return steps

    gradient = functools.partial(gradient_of, work, device)
    reference = functools.cache(lambda: gradient(task_by_task, None))

    def contender(name: str, way: Way, *, chunk: int | None = None, context: Context = nullcontext) -> Contender:
        def difference() -> float:
            return float((gradient(way, chunk) - reference()).norm() / reference().norm())

        def memory() -> str:
            return f"{peaks[name]:.1f} GiB" if name in peaks else ""

        return Contender(
            name,
            lambda: timed(name, way, chunk, context),
            way not in PEERS,
            device_clock(),
            difference if context is nullcontext else None,
            note=memory,
        )

    bf16 = functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16)
    return [
        contender("one pass as a CUDA graph, compiled, bf16", compiled, context=bf16),
        contender("one pass as a CUDA graph, compiled", compiled),
        contender("one pass as a CUDA graph, bf16", OuterStep, context=bf16),
        contender("one pass as a CUDA graph", OuterStep),
        contender("all tasks in one pass, bf16", in_one_pass, context=bf16),
        contender("all tasks in one pass", in_one_pass),
        contender(f"{work.tasks // 2} tasks a pass", in_one_pass, chunk=work.tasks // 2),
        *[contender("jax, one jitted function, bf16", by_jax, context=bf16)] * (device == "cuda"),
        *[contender("jax, one jitted function", by_jax)] * (device == "cuda"),
        contender("task by task, bf16", task_by_task, context=bf16),
        contender("task by task", task_by_task),
    ]


def t5_base() -> list[Contender]:
    """The shape of T5-base; 2 layers of 48 features and 32 tokens on a CPU."""
    if torch.cuda.is_available():
        return outer_steps(PromptWork("t5", 12, 768, 12, 3072, 32_128))
    return outer_steps(PromptWork("t5", 2, 48, 3, 96, 1_500, width=32))


def smollm2() -> list[Contender]:
    """The shape of SmolLM2-135M; 2 layers of 48 features and 32 tokens on a CPU."""
    if torch.cuda.is_available():
        return outer_steps(PromptWork("llama", 30, 576, 9, 1536, 49_152))
    return outer_steps(PromptWork("llama", 2, 48, 3, 96, 1_500, width=32))
