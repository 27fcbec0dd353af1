"""Rows of run_speed.py about text: tokens a second, padding left out, of training and of embedding.

Three sets of rows with random tokens, as long as the training rows of CS224N's three tasks are (log-normal lengths with
the mean and spread of MiniLM's tokens there). The model has MiniLM's size on a GPU, BERT-tiny's layers on a CPU, and
random weights. A call is one pass over all rows, the same rows for each contender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock, wait
from torch import Tensor

from metapretrain.data.made import made_tasks
from metapretrain.data.tokens import Tokens
from metapretrain.experiments.text.objectives import TextLabels, TextRows, TextStep, build_heads
from metapretrain.experiments.text.recipe import TextMethod
from metapretrain.experiments.text.streams import TextStream
from metapretrain.models.language_models import tiny_tokenizer
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.training import TrainSettings
from metapretrain.training.engine import WARMUP_UPDATES, Engine, build_optimizer

LENGTHS = {"sst": (3.10, 0.51), "para": (3.35, 0.36), "sts": (3.24, 0.42)}  # of the logarithm: mean, deviation
LONGEST, MULTIPLE = 128, 8
Pass = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """Rows of each task, rows of each in an update, rows that are embedded at once, and the model."""

    rows: int
    batch: int
    embedded: int
    model: Mapping[str, Any]


GPU = Size(
    2048,
    64,
    256,
    {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "vocab_size": 30522,
    },
)
CPU = Size(
    96,
    16,
    16,
    {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 2000,
    },
)


def size() -> Size:
    return GPU if torch.cuda.is_available() else CPU


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def precision() -> str:
    return "bf16" if torch.cuda.is_available() else "fp32"


def random_rows(name: str, count: int) -> list[list[int]]:
    """Token ids of `count` rows, the longest of them as long as is allowed."""
    generator = torch.Generator().manual_seed(list(LENGTHS).index(name))
    mean, deviation = LENGTHS[name]
    lengths = torch.empty(count).log_normal_(mean, deviation, generator=generator).round().clamp(4, LONGEST).long()
    lengths[0] = LONGEST
    return [torch.randint(5, 700, (n,), generator=generator).tolist() for n in lengths.tolist()]


def new_encoder() -> TextEncoder:
    from transformers import BertConfig, BertModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(**size().model, max_position_embeddings=LONGEST)
        return TextEncoder(BertModel(config), tiny_tokenizer())


class Work:
    """A model with heads, its optimizer, and the rows: the same for every contender."""

    def __init__(self, graph: bool = False) -> None:
        from metapretrain.training.environment import make_accelerator

        self.rows = {name: random_rows(name, size().rows) for name in LENGTHS}
        self.tokens = {name: Tokens.from_rows(rows) for name, rows in self.rows.items()}
        tasks = made_tasks(rows=size().rows)
        self.encoder = new_encoder()
        heads = build_heads(tasks, TextMethod(joined=True), "mlp", self.encoder.features)
        objectives = {t.name: TextLabels(TextRows(t, self.tokens[t.name]), heads[t.name]) for t in tasks}
        step = TextStep(self.encoder, objectives)
        settings = TrainSettings(steps=1, lr=1e-5, optimizer="adamw", precision=precision(), cuda_graph=graph)
        accelerator = make_accelerator("auto", precision())
        step.to(accelerator.device)
        self.step, self.optimizer = accelerator.prepare(step, build_optimizer(step, settings, accelerator.device))
        self.engine = Engine(self.step, self.optimizer, accelerator, settings)
        self.step.train()

    @property
    def total(self) -> int:
        """Tokens of a pass."""
        return sum(int(tokens.lengths.sum()) for tokens in self.tokens.values())

    def stream(self, fixed: bool) -> Iterator[dict[str, Any]]:
        """Batches without end: of rows of similar length, or of any rows with the longest row's width."""
        batches = size().rows // size().batch
        stream = TextStream(
            self.tokens,
            size().batch,
            "longest",
            seed=0,
            steps=10**9,
            pool=1 if fixed else batches,
            multiple=LONGEST if fixed else MULTIPLE,
        )
        return iter(stream)

    def collated(self, grouped: bool, batch: int, workers: int = 0, shuffle: bool = True) -> list[Any]:
        """A DataLoader a task with transformers' collator; a row's number goes where its label would."""
        from torch.utils.data import DataLoader
        from transformers import DataCollatorWithPadding

        loaders = []
        for rows in self.rows.values():
            data: Any = [{"input_ids": row, "label": number} for number, row in enumerate(rows)]
            sampler = None
            if grouped:
                from transformers.trainer_pt_utils import LengthGroupedSampler

                sampler = LengthGroupedSampler(batch, lengths=[len(row) for row in rows])
            loaders.append(
                DataLoader(
                    data,
                    batch,
                    shuffle=shuffle and not grouped,
                    sampler=sampler,
                    num_workers=workers,
                    collate_fn=DataCollatorWithPadding(tiny_tokenizer()),
                    persistent_workers=workers > 0,
                    pin_memory=torch.cuda.is_available(),
                )
            )
        return loaders


def passes(one: Pass, warm: int = 1) -> Callable[[int], None]:
    """A function of n: n passes, then one wait for the GPU."""

    def calls(n: int) -> None:
        for _ in range(n):
            one()
        wait()

    calls(warm)  # lazy set-up, autotuning and recording are not timed
    return calls


def by_stream(fixed: bool, graph: bool) -> Callable[[int], None]:
    """Updates by the engine of the training loop, rows gathered on the device."""
    if graph and not torch.cuda.is_available():
        raise Missing("a CUDA GPU")
    work = Work(graph)
    batches = work.stream(fixed)

    def one() -> None:
        for _ in range(size().rows // size().batch):
            work.engine.set_rate(lambda peak: 1e-5)
            work.engine.update([next(batches)])

    return passes(one, WARMUP_UPDATES + 2 if graph else 1)


def by_collator(grouped: bool, workers: int = 0) -> Callable[[int], None]:
    """A plain loop over DataLoaders: each task's batch through the encoder, one update for their summed losses."""
    if workers and not torch.cuda.is_available():
        raise Missing("a CUDA GPU")
    work = Work()
    loaders, bf16 = work.collated(grouped, size().batch, workers), precision() == "bf16"

    def one() -> None:
        for batches in zip(*loaders, strict=True):
            work.optimizer.zero_grad()
            with torch.autocast(device(), torch.bfloat16, enabled=bf16):
                losses: list[Tensor] = []
                for name, batch in zip(LENGTHS, batches, strict=True):
                    here = {key: value.to(device(), non_blocking=True) for key, value in batch.items()}
                    given = {name: {"rows": here.pop("labels")}}
                    losses += work.step.losses(given, {name: [work.encoder(here)]}).values()
            torch.stack(losses).sum().backward()
            work.optimizer.step()

    return passes(one)


def training() -> list[Contender]:
    """An update of three tasks, joined pairs, each with a head of its own."""
    total = Work().total

    def contender(name: str, make: Callable[[], Callable[[int], None]], ours: bool = False) -> Contender:
        return Contender(name, make, ours, device_clock(), each=total)

    return [
        contender("TextStream, CUDA graphs", lambda: by_stream(fixed=False, graph=True), ours=True),
        contender("TextStream", lambda: by_stream(fixed=False, graph=False), ours=True),
        contender("padded to the longest row, CUDA graph", lambda: by_stream(fixed=True, graph=True)),
        contender("padded to the longest row", lambda: by_stream(fixed=True, graph=False)),
        contender("DataLoader, DataCollatorWithPadding", lambda: by_collator(grouped=False)),
        contender("the same, 4 workers", lambda: by_collator(grouped=False, workers=4)),
        contender("the same, LengthGroupedSampler", lambda: by_collator(grouped=True)),
    ]


def embedding() -> list[Contender]:
    """Embeddings of all rows, without gradients."""
    from metapretrain.experiments.text.training import embed_tokens

    work = Work()
    work.encoder.eval()
    tokens = {name: rows.to(device()) for name, rows in work.tokens.items()}
    bf16 = precision() == "bf16"

    @torch.no_grad()
    def sorted_rows() -> None:
        with torch.autocast(device(), torch.bfloat16, enabled=bf16):
            for rows in tokens.values():
                embed_tokens(work.encoder, rows, device(), LONGEST, size().embedded)

    @torch.no_grad()
    def longest() -> None:
        with torch.autocast(device(), torch.bfloat16, enabled=bf16):
            for rows in tokens.values():
                for part in torch.arange(len(rows), device=device()).split(size().embedded):
                    work.encoder(rows.gather(part, LONGEST))

    loaders = work.collated(grouped=False, batch=size().embedded, shuffle=False)

    @torch.no_grad()
    def collated() -> None:
        with torch.autocast(device(), torch.bfloat16, enabled=bf16):
            for loader in loaders:
                for batch in loader:
                    batch.pop("labels")
                    work.encoder({key: value.to(device(), non_blocking=True) for key, value in batch.items()})

    def contender(name: str, one: Pass, ours: bool = False) -> Contender:
        return Contender(name, lambda: passes(one), ours, device_clock(), each=work.total)

    return [
        contender("embed_tokens", sorted_rows, ours=True),
        contender("padded to the longest row", longest),
        contender("DataLoader, DataCollatorWithPadding", collated),
    ]
