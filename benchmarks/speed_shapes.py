"""The engine `auto` on a CPU beside its peers over many shapes: `run_speed.py --shapes`.

Speed: all contenders of a shape take turns, and each round gives the ratio of `auto` to each peer; the lowest of the
peers' median ratios is the shape's. Memory: bytes of tensors that a meta-step holds at most above those before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from speed_contenders import Missing, device_clock
from speed_maml import (
    MamlWork,
    chosen,
    meta_step_of_engine,
    meta_step_of_higher,
    meta_step_of_learn2learn,
    meta_step_of_torchopt,
)
from speed_memory import MIB, held

NETWORKS = {
    "cnn-28": MamlWork(8, 1, 15, 28, 1, 64, 1, 2, pooled=False),
    "cnn-84": MamlWork(2, 1, 15, 84, 3, 32, 1, 2, pooled=True),
    "mlp-40": MamlWork(16, 2, 10, 1, 1, 40, 1, 2, pooled=False, hidden=2),
    "mlp-200": MamlWork(16, 1, 15, 28, 1, 200, 1, 2, pooled=False, hidden=2),
    "mlp-1000": MamlWork(4, 1, 15, 28, 1, 1000, 1, 2, pooled=False, hidden=2),
}
PEERS = {"learn2learn": meta_step_of_learn2learn, "higher": meta_step_of_higher, "torchopt": meta_step_of_torchopt}
CONTENDERS = {"auto": meta_step_of_engine("auto"), **PEERS}


def shapes() -> dict[str, MamlWork]:
    """Every network with one and five inner steps, of second and of first order."""
    kinds = [(order, steps) for order in (2, 1) for steps in (1, 5)]
    return {
        f"{name}, {steps} step{'s' * (steps > 1)}, order {order}": work.changed(steps, order)
        for name, work in NETWORKS.items()
        for order, steps in kinds
    }


@dataclass(frozen=True)
class Shape:
    """`speed` is the ratio of `auto` to each peer, `memory` MiB of each contender's tensors, empty if not counted."""

    name: str
    engine: str
    rounds: int
    meta_steps_per_second: dict[str, float]
    speed: dict[str, float]
    memory: dict[str, float]

    @property
    def slowest(self) -> float:
        """The ratio of `auto` to the peer that is fastest."""
        return min(self.speed.values())

    @property
    def largest(self) -> float:
        """Memory of `auto` as a multiple of the most modest peer's."""
        return self.memory["auto"] / min(value for name, value in self.memory.items() if name != "auto")


def measure_shapes(names: list[str], rounds: int, seconds: float) -> Iterator[Shape]:
    """Each shape as soon as it is measured; a round times every contender for about `seconds`."""
    clock = device_clock()
    for name in names:
        work = shapes()[name]
        steps = dict(made(work))
        counts = {key: calls_in(seconds, step) for key, step in steps.items()}
        rates: dict[str, list[float]] = {key: [] for key in steps}
        order = list(steps)
        for number in range(rounds):
            for key in order[number % len(order) :] + order[: number % len(order)]:
                begin = clock()
                for _ in range(counts[key]):
                    steps[key]()
                rates[key].append(counts[key] / (clock() - begin))
        ratios = {
            key: statistics.median(a / b for a, b in zip(rates["auto"], rates[key], strict=True))
            for key in steps
            if key in PEERS
        }
        medians = {key: statistics.median(values) for key, values in rates.items()}
        memory = {key: held(step, 1)[0] / MIB for key, step in steps.items()}
        yield Shape(name, chosen(work, "cpu"), rounds, medians, ratios, memory)


def made(work: MamlWork) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The contenders that are installed and can do this work."""
    for name, make in CONTENDERS.items():
        try:
            yield name, step_of(work, make)
        except Missing:
            continue


def step_of(work: MamlWork, make: Any) -> Callable[[], Any]:
    torch.manual_seed(0)
    net = work.network()
    step = make(work, net, *work.data("cpu", torch.float32))

    def whole() -> None:
        net.zero_grad()
        step()

    return whole


def calls_in(seconds: float, step: Callable[[], Any]) -> int:
    for _ in range(2):
        step()
    clock = device_clock()
    begin = clock()
    step()
    return max(1, round(seconds / (clock() - begin)))


def table(found: list[Shape]) -> str:
    """The results as Markdown."""
    lines = [
        "| shape | engine | meta-steps per second | times the best peer's | tensors, MiB | times the smallest peer's |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for shape in found:
        rate = shape.meta_steps_per_second["auto"]
        memory = f"{shape.memory['auto']:.3g} | {shape.largest:.2f}" if shape.memory else " | "
        lines.append(f"| {shape.name} | {shape.engine} | {rate:.3g} | {shape.slowest:.2f} | {memory} |")
    return "\n".join(lines)
