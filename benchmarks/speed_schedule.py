"""Rows of run_speed.py about scheduling: a decision of Algorithm 1 as written, by exact and by Taylor utilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock, wait
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from metapretrain.draws import generator
from metapretrain.scheduling import UtilityScheduler, agreement, probe_units

CLASSES, VOCABULARY = 4, 30522
DRAWS = 2  # decisions whose utilities are compared
QUICKEST = (("exact", "target_losses"), ("taylor", "loss_many"))  # on a GPU, of either kind
Decide = Callable[[int], dict[str, float]]  # number of a decision to utilities


@dataclass(frozen=True)
class DecisionWork:
    """A decision over classification tasks on one BERT encoder: batches of `batch` sequences of `length` tokens."""

    layers: int
    features: int
    batch: int
    length: int
    device: str
    bf16: bool = False
    sources: int = 5
    targets: int = 4
    samples: int = 2
    alpha: float = 1e-3

    @property
    def names(self) -> tuple[list[str], list[str]]:
        return [f"s{i}" for i in range(self.sources)], [f"t{i}" for i in range(self.targets)]

    def model(self) -> Any:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.features,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.features // 64),
            intermediate_size=4 * self.features,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        torch.manual_seed(0)
        with torch.device(self.device):  # BERT-base takes seconds to draw on a CPU, and a row needs a dozen
            heads = nn.ModuleDict({name: nn.Linear(self.features, CLASSES) for part in self.names for name in part})
            return nn.ModuleDict({"encoder": BertModel(config, add_pooling_layer=False), "heads": heads})


class ClassProbe:
    """A task whose batches are random tokens and classes."""

    def __init__(self, work: DecisionWork, model: Any, name: str) -> None:
        self.work, self.model, self.name = work, model, name

    def sample(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCABULARY, (self.work.batch, self.work.length), generator=random)
        classes = torch.randint(CLASSES, (self.work.batch,), generator=random)
        return ids.to(self.work.device), classes.to(self.work.device)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss_of(embed(self.work, self.model, batch[0]), batch[1])

    def loss_of(self, z: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(self.model["heads"][self.name](z), classes)


class ManyProbe(ClassProbe):
    """Takes the M batches of a task in one forward pass."""

    def loss_many(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        z = embed(self.work, self.model, torch.cat([ids for ids, _ in batches]))
        parts = z.split(self.work.batch)
        return torch.stack([self.loss_of(part, y) for part, (_, y) in zip(parts, batches, strict=True)])


def embed(work: DecisionWork, model: Any, ids: Tensor) -> Tensor:
    with torch.autocast(work.device, torch.bfloat16, enabled=work.bf16):
        states: Tensor = model["encoder"](input_ids=ids)[0]
    return states.float().mean(1)


def as_written(work: DecisionWork, model: Any, number: int) -> dict[str, float]:
    """Lines 3 to 9: batch after batch, a step in place that is taken back; losses are summed on the device."""
    sources, targets = ([ClassProbe(work, model, name) for name in part] for part in work.names)
    weights = list(model.parameters())
    kept = [p.detach().clone() for p in weights]
    looked_at = [
        (probe, probe.sample(random))
        for probe in targets
        for random in [generator(0, number, "target", probe.name)]
        for _ in range(work.samples)
    ]
    found = {}
    for source in sources:
        random = generator(0, number, "source", source.name)
        utility = torch.zeros((), device=work.device)
        for _ in range(work.samples):
            source.loss(source.sample(random)).backward()
            with torch.no_grad():
                for p in weights:
                    if p.grad is not None:
                        p -= work.alpha * p.grad
                        p.grad = None
                for probe, batch in looked_at:
                    utility -= probe.loss(batch)
                for p, value in zip(weights, kept, strict=True):
                    p.copy_(value)
        found[source.name] = utility.item()
    return found


def by_scheduler(work: DecisionWork, utility: str, how: str, layers: int = 0) -> Callable[[Any], Decide]:
    def make(model: Any) -> Decide:
        kind = ManyProbe if how == "loss_many" else ClassProbe
        sources, targets = ({name: kind(work, model, name) for name in part} for part in work.names)

        def joint(batches: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
            flat = [(name, *batch) for name, listed in batches.items() for batch in listed]
            z = embed(work, model, torch.cat([ids for _, ids, _ in flat])).split(work.batch)
            losses = [targets[name].loss_of(part, y) for part, (name, _, y) in zip(z, flat, strict=True)]
            return dict(zip(batches, torch.stack(losses).view(len(batches), -1), strict=True))

        moved = model if not layers else [*model["heads"].parameters(), *last_layers(model, layers)]
        scheduler = UtilityScheduler(
            sources,
            targets,
            moved,
            alpha=work.alpha,
            samples=work.samples,
            updates=1,
            utility=utility,
            target_losses=joint if how == "target_losses" else None,
        )
        return lambda number: dict(scheduler.choose().utilities)

    return make


def last_layers(model: Any, layers: int) -> list[Any]:
    return [p for layer in model["encoder"].encoder.layer[-layers:] for p in layer.parameters()]


def decision(work: DecisionWork) -> list[Contender]:
    """A decision of every kind.

    The difference, and the rank correlation that the note tells (a mean over DRAWS decisions), are those of the
    utilities to Algorithm 1 as written in float32, on the same batches; the difference is of utilities less their mean.
    """
    torch.backends.cuda.matmul.allow_tf32 = False

    def timed(make: Callable[[Any], Decide]) -> Callable[[int], None]:
        try:
            decide = make(work.model())
        except ImportError as error:
            raise Missing("transformers") from error

        def decisions(n: int) -> None:
            for number in range(n):
                decide(number)
            wait()

        return decisions

    def written(model: Any) -> Decide:
        return lambda number: as_written(work, model, number)

    @functools.cache
    def reference() -> list[dict[str, float]]:
        exact = replace(work, bf16=False)
        model = exact.model()
        return [as_written(exact, model, number) for number in range(DRAWS)]

    def contender(utility: str, how: str = "", layers: int = 0, bf16: bool = work.bf16) -> Contender:
        own = replace(work, bf16=bf16)
        make = by_scheduler(own, utility, how, layers)
        units = probe_units(work.sources, work.targets, work.samples, utility)
        parts = [utility, how, f"last {layers} of {work.layers} layers" if layers else ""]
        parts += ["bfloat16"] * (bf16 and not work.bf16)

        @functools.cache
        def utilities() -> list[dict[str, float]]:
            decide = make(own.model())
            return [decide(number) for number in range(DRAWS)]

        def difference() -> float:
            mine, theirs = (above_mean(found[0]) for found in (utilities(), reference()))
            return float((mine - theirs).norm() / theirs.norm())

        def note() -> str:
            ranks = [agreement(*pair).rank_correlation for pair in zip(reference(), utilities(), strict=True)]
            return f"rank correlation {sum(ranks) / len(ranks):.2f}"

        name = f"{', '.join(filter(None, parts))}: {units} passes"
        return Contender(name, lambda: timed(make), True, device_clock(), difference, note=note)

    units = probe_units(work.sources, work.targets, work.samples)
    third = max(1, work.layers // 3)
    return [
        Contender(f"Algorithm 1 as written: {units} passes", lambda: timed(written), False, device_clock()),
        contender("exact"),
        contender("exact", "loss_many"),
        contender("exact", "target_losses"),
        contender("taylor"),
        contender("taylor", "loss_many"),
        contender("taylor", "loss_many", third),
        *([] if work.bf16 else [contender(*how, bf16=True) for how in QUICKEST]),
    ]


def above_mean(utilities: Mapping[str, float]) -> Tensor:
    values = torch.tensor(list(utilities.values()), dtype=torch.float64)
    return values - values.mean()


def on_this_machine(bf16: bool) -> list[Contender]:
    """BERT-base and batches of 16 x 128 tokens on a GPU; 4 layers of 128 and batches of 4 x 64 on a CPU."""
    if torch.cuda.is_available():
        return decision(DecisionWork(12, 768, 16, 128, "cuda", bf16))
    return decision(DecisionWork(4, 128, 4, 64, "cpu", bf16))
