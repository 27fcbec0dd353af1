"""How a row of run_speed.py is measured: its contenders in turns, each timing long enough to mean something."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from speed_contenders import Contender, Missing, count_kernels, float32_limit


@dataclass(frozen=True)
class Settings:
    """`repeats` timings of each contender, each of at least `seconds`."""

    repeats: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """Units a second: median and range over `repeats` timings; `ratio` to the fastest peer.

    `kernels` that one call starts (operations, on a CPU) and how often it waits for the GPU, where counted. `tflops`
    are of the arithmetic that the work needs, `share` is of the GPU's float32 limit.
    """

    row: str
    name: str
    ours: bool
    median: float
    low: float
    high: float
    ratio: float | None = None
    missing: str | None = None
    difference: float | None = None
    kernels: int | None = None
    waits: int | None = None
    note: str = ""
    repeats: int = 0
    tflops: float | None = None
    share: float | None = None


def measure(
    name: str, contenders: list[Contender], settings: Settings, keep: Callable[[list[Result]], None] = lambda _: None
) -> list[Result]:
    """Time the contenders in turns; work is sized so that one timing lasts `seconds`.

    A contender's first timing follows its sizing, so that `keep` has something early: it gets what there is after every
    timing, and each time that more is known about a contender.
    """
    running: list[tuple[Contender, Callable[[int], None], int]] = []
    missing: list[Result] = []
    rates: dict[str, list[float]] = {}
    results: list[Result] = []

    def time_one(contender: Contender, work: Callable[[int], None], n: int) -> None:
        begin = contender.clock()
        work(n)
        rates.setdefault(contender.name, []).append(n * contender.each / (contender.clock() - begin))
        results[:] = timed(name, [contender for contender, _, _ in running], rates)
        keep(results + missing)

    for contender in contenders:
        try:
            work = contender.make()
        except Missing as error:
            missing.append(Result(name, contender.name, contender.ours, 0, 0, 0, missing=str(error)))
            continue
        running.append((contender, work, calibrate(contender, work, settings.seconds)))
        time_one(*running[-1])
    for _ in range(settings.repeats - 1):
        for one in running:
            time_one(*one)
    for place, (contender, work, _) in enumerate(running):
        difference = contender.difference() if contender.difference else None
        note = contender.note() if contender.note else ""
        kernels, waits = counted(work) if contender.count else (None, None)
        results[place] = replace(results[place], difference=difference, kernels=kernels, waits=waits, note=note)
        keep(results + missing)
    if any(contender.flop for contender, _, _ in running):
        limit = float32_limit()
        for place, (contender, _, _) in enumerate(running):
            speed = results[place].median * contender.flop / contender.each
            results[place] = replace(results[place], tflops=speed / 1e12, share=speed / limit)
        keep(results + missing)
    return results + missing


def timed(name: str, contenders: list[Contender], rates: Mapping[str, list[float]]) -> list[Result]:
    """The results that these rates make."""
    medians = {contender.name: statistics.median(rates[contender.name]) for contender in contenders}
    best_peer = max((medians[c.name] for c in contenders if not c.ours), default=None)
    results = []
    for contender in contenders:
        values, median = rates[contender.name], medians[contender.name]
        ratio = median / best_peer if best_peer else None
        result = Result(name, contender.name, contender.ours, median, min(values), max(values), ratio)
        results.append(replace(result, repeats=len(values)))
    return results


def counted(work: Callable[[int], None]) -> tuple[int, int | None]:
    """Kernels and waits of one call: two calls less one, so that the wait after the last one drops out."""
    (two, waited_twice), (one, waited) = count_kernels(lambda: work(2)), count_kernels(lambda: work(1))
    return two - one, None if waited is None or waited_twice is None else waited_twice - waited


def calibrate(contender: Contender, work: Callable[[int], None], seconds: float) -> int:
    """Calls of `work` that take `seconds`."""
    for _ in range(2):  # the first call may compile
        begin = contender.clock()
        work(1)
        spent = contender.clock() - begin
    if spent > seconds:
        return 1
    n = 1
    while True:
        begin = contender.clock()
        work(n)
        spent = contender.clock() - begin
        if spent > seconds / 4:
            return max(1, int(n * seconds / spent))
        n *= 4
