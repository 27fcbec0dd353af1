"""Rows of run_speed.py about prompts: an outer step of prompt MAML with all tasks in one pass, and task by task."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock, wait
from torch.nn.attention import SDPBackend, sdpa_kernel

from metapretrain.models.language_models import tiny_word_tokenizer
from metapretrain.prompts import PromptBatch, PromptMAML, PromptTemplate, SoftPrompt, Verbalizer

WORDS = ("terrible", "bad", "maybe", "good", "great")
RATE = 0.08


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
                vocab_size=self.vocabulary, d_model=self.features, d_kv=self.features // self.heads, d_ff=self.inner,
                num_layers=self.layers, num_heads=self.heads,
            )  # fmt: skip
            config.decoder_start_token_id = 0
            return T5ForConditionalGeneration(config)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.features, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=max(1, self.heads // 3),
            max_position_embeddings=2048, tie_word_embeddings=True,
        ))  # fmt: skip

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


def in_one_pass(maml: PromptMAML, support: PromptBatch, query: PromptBatch) -> None:
    """Ours: :meth:`PromptMAML.backward`."""
    maml.backward(support, query)


def task_by_task(maml: PromptMAML, support: PromptBatch, query: PromptBatch) -> None:
    """Algorithm 1 as it is written down."""
    prompt, model = maml.prompt.weight, maml.prompted
    for task in range(len(support)):
        mine, other = (part.take(torch.tensor(task, device=part.answer.device)) for part in (support, query))
        with sdpa_kernel(SDPBackend.MATH):  # the only one that can be differentiated twice
            (gradient,) = torch.autograd.grad(model.losses(prompt, mine).mean(), prompt, create_graph=True)
        model.losses(prompt - RATE * gradient, other).mean().backward()


def outer_steps(work: PromptWork) -> list[Contender]:
    """Contenders of one piece of work; float32 without TF32 but for the one that says bf16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    Step = Callable[[PromptMAML, PromptBatch, PromptBatch], None]
    peaks: dict[str, float] = {}

    def timed(name: str, step: Step, chunk: int | None, mixed: bool) -> Callable[[int], None]:
        if mixed and device == "cpu":
            raise Missing("a GPU")
        maml = work.learner(device, torch.float32, chunk)
        support, query = work.rows(1, device), work.rows(2, device)

        def steps(n: int) -> None:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for _ in range(n):
                maml.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16) if mixed else nullcontext():
                    step(maml, support, query)
            wait()
            if device == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30

        return steps

    def gradient(step: Step, chunk: int | None) -> Any:
        maml = work.learner(device, torch.float64, chunk)
        step(maml, work.rows(1, device), work.rows(2, device))
        return maml.prompt.weight.grad

    reference = functools.cache(lambda: gradient(task_by_task, None))

    def contender(name: str, step: Step, *, chunk: int | None = None, mixed: bool = False) -> Contender:
        def difference() -> float:
            return float((gradient(step, chunk) - reference()).norm() / reference().norm())

        def memory() -> str:
            return f"{peaks[name]:.1f} GiB" if name in peaks else ""

        ours = step is in_one_pass
        return Contender(
            name, lambda: timed(name, step, chunk, mixed), ours, device_clock(), None if mixed else difference,
            note=memory,
        )  # fmt: skip

    return [
        contender("all tasks in one pass", in_one_pass),
        contender(f"{work.tasks // 2} tasks a pass", in_one_pass, chunk=work.tasks // 2),
        contender("all tasks in one pass, bf16", in_one_pass, mixed=True),
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
