"""Rows of run_speed.py about memory: the most that a meta-step holds, and what fifty episodes leave behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from speed_contenders import Missing
from speed_maml import MamlWork, meta_step_of_higher, meta_step_of_learn2learn

from metapretrain.maml import MAML

MIB = 2**20
Make = Callable[[MamlWork, Any, Any, Any], Callable[[], Any]]


@dataclass(frozen=True)
class Memory:
    """`peak` MiB that one meta-step holds at most, above what was there before it; `ratio` of the best peer's to it.

    `left` is what stays in MiB after `episodes` further meta-steps, 0 where memory is flat.
    """

    row: str
    name: str
    ours: bool
    peak: float
    left: float
    episodes: int
    ratio: float | None = None
    missing: str | None = None


@dataclass(frozen=True)
class MemoryContender:
    """A way to do a meta-step of `work`, as for the rows that are timed."""

    name: str
    work: MamlWork
    make: Make
    ours: bool = False


def omniglot(steps: int) -> list[MemoryContender]:
    """On Omniglot's shape: 32 tasks, or 8 on a CPU."""
    tasks = 32 if torch.cuda.is_available() else 8
    return contenders(MamlWork(tasks, 1, 15, 28, 1, 64, steps, 2, pooled=False), chunk=4)


def colour() -> list[MemoryContender]:
    """On mini-ImageNet's shape: 4 tasks, 5 inner steps. On a CPU it would take a quarter of an hour."""
    found = contenders(MamlWork(4, 1, 15, 84, 3, 32, 5, 2, pooled=True), chunk=2)
    return found if torch.cuda.is_available() else [replace(c, make=_needs_gpu) for c in found]


def _needs_gpu(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    raise Missing("a GPU")


def contenders(work: MamlWork, chunk: int) -> list[MemoryContender]:
    """Our engines, whole and in chunks, beside learn2learn and higher."""
    return [
        MemoryContender("engine loop", work, ours("loop"), ours=True),
        MemoryContender("engine loop, checkpointed", work, ours("loop", checkpoint=True), ours=True),
        MemoryContender(f"engine vmap, chunks of {chunk}", work, ours("vmap", chunk=chunk), ours=True),
        MemoryContender("engine vmap, all tasks", work, ours("vmap"), ours=True),
        MemoryContender("learn2learn", work, meta_step_of_learn2learn),
        MemoryContender("higher", work, meta_step_of_higher),
    ]


def ours(engine: str, **options: Any) -> Make:
    """An engine of ours with options of :class:`metapretrain.MAML`."""

    def make(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
        maml = MAML(net, work.rate, work.order == 1, steps=work.steps, engine=engine, **options)
        return lambda: maml.backward(support, query)

    return make


def measure_memory(row: str, contenders: list[MemoryContender], episodes: int) -> list[Memory]:
    """The most that one meta-step holds, and what `episodes` meta-steps of a single task leave."""
    if not torch.cuda.is_available():
        episodes = min(episodes, 10)  # the profiler keeps every operation
    found = [_measured(row, contender, episodes) for contender in contenders]
    best = min((m.peak for m in found if not m.ours and not m.missing), default=None)
    return [m if best is None or m.missing else replace(m, ratio=best / m.peak) for m in found]


def _measured(row: str, contender: MemoryContender, episodes: int) -> Memory:
    result = Memory(row, contender.name, contender.ours, 0.0, 0.0, episodes)
    try:
        peak, _ = held(_step(contender.work, contender.make), 1)
        _, left = held(_step(replace(contender.work, tasks=1), contender.make), episodes)
    except Missing as error:
        return replace(result, missing=str(error))
    return replace(result, peak=peak / MIB, left=left / MIB)


def _step(work: MamlWork, make: Make) -> Callable[[], None]:
    """A meta-step that has run twice, so that what is made once is there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = work.network().to(device)
    step = make(work, net, *work.data(device, torch.float32))

    def whole() -> None:
        step()
        net.zero_grad()

    whole()
    whole()
    return whole


def held(step: Callable[[], object], times: int) -> tuple[int, int]:
    """(most, left): bytes of tensors above those at the start, while and after `step` runs `times` times."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _repeat(step, times)
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler tells each start and stop on stderr
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        _repeat(step, times)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # below 0 where memory is given back
        most = max(most, now)
    return most, now


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()
    gc.collect()


def memory_table(found: list[Memory]) -> str:
    """The results as Markdown."""
    lines = ["| row | contender | peak of a meta-step | afterwards | to the best peer |", "|---|---|---|---|---|"]
    for m in found:
        if m.missing:
            lines.append(f"| {m.row} | {m.name} | skipped: needs {m.missing} | | |")
            continue
        ratio = f"{m.ratio:.2f}x" if m.ratio else ""
        left = f"{m.left:.2f} MiB after {m.episodes} episodes"
        lines.append(f"| {m.row} | {m.name} | {m.peak:,.1f} MiB | {left} | {ratio} |")
    return "\n".join(lines)
