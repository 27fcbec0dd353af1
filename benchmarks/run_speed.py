"""How fast the package is beside other libraries: every row measured with its peers in this process.

A row is a function that returns the contenders of one piece of work; @row(name, unit) registers it.
Contenders take turns, so that a change in the machine's load meets all of them. The clock is the CPU time of
this thread, which other processes disturb least; a row with work on a GPU or in other processes gives its
contenders another clock. Rows named memory-... are not timed: they count bytes of tensors.

    python benchmarks/run_speed.py --rows planning-omniglot
"""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from speed_contenders import Contender
from speed_measure import Result, Settings, measure

from metapretrain.options import Parser, main_guard, names, positive_int
from metapretrain.training.files import write_file

Row = Callable[[], list[Any]]  # of Contender, or of MemoryContender
BYTES = "MiB"  # the unit of rows that are not timed
ROWS: dict[str, tuple[str, Row]] = {}


def row(name: str, unit: str) -> Callable[[Row], Row]:
    """Register a row under its name; `unit` is what is counted."""

    def register(function: Row) -> Row:
        ROWS[name] = (unit, function)
        return function

    return register


@row("planning-omniglot", "episodes")
def planning_omniglot() -> list[Contender]:
    """Planning on Omniglot's shape, 1,623 classes of 20."""
    from speed_episodes import planning

    return planning(1623, 20)


@row("planning-large-classes", "episodes")
def planning_large_classes() -> list[Contender]:
    """Planning on STL-10's shape, 10 classes of 500."""
    from speed_episodes import planning

    return planning(10, 500)


@row("loading-tensor", "episodes")
def loading_tensor() -> list[Contender]:
    """Planning and reading 5-way episodes of 16 each out of 28x28 images in memory, in this process."""
    from speed_episodes import loading

    return loading(1623, 20)


@row("augment-plain", "images")
def augment_plain() -> list[Contender]:
    """Random crop and mirror of 128 x 3 x 96 x 96."""
    from speed_images import augmentation

    return augmentation("plain")


@row("augment-strong", "images")
def augment_strong() -> list[Contender]:
    """With colour, grey and cutout."""
    from speed_images import augmentation

    return augmentation("strong")


@row("augment-simclr", "images")
def augment_simclr() -> list[Contender]:
    """With colour, grey and blur."""
    from speed_images import augmentation

    return augmentation("simclr")


@row("train", "images")
def train() -> list[Contender]:
    """Training ResNet-18 at 96 pixels."""
    from speed_images import training

    return training()


@row("prototypical-loss", "steps")
def prototypical_loss() -> list[Contender]:
    """Loss and gradient of 128 embeddings of 512 numbers, 10 classes, standard mode."""
    from speed_episodes import prototypical

    return prototypical()


@row("maml-omniglot-1-step", "meta-steps")
def maml_omniglot_1() -> list[Contender]:
    """CNN4-64, 28x28, 5-way 1-shot, 15 queries a class, 1 inner step, 32 tasks (8 on a CPU)."""
    from speed_maml import omniglot

    return omniglot(steps=1, order=2)


@row("maml-omniglot-5-steps", "meta-steps")
def maml_omniglot_5() -> list[Contender]:
    """The same with 5 inner steps."""
    from speed_maml import omniglot

    return omniglot(steps=5, order=2)


@row("maml-84-5-steps", "meta-steps")
def maml_84() -> list[Contender]:
    """CNN4-32 with max-pooling, 84x84 in colour, 5-way 1-shot, 15 queries a class, 5 inner steps, 4 tasks."""
    from speed_maml import colour

    return colour(order=2)


@row("fomaml-omniglot-1-step", "meta-steps")
def fomaml_omniglot_1() -> list[Contender]:
    """First order, 1 inner step."""
    from speed_maml import omniglot

    return omniglot(steps=1, order=1)


@row("fomaml-omniglot-5-steps", "meta-steps")
def fomaml_omniglot_5() -> list[Contender]:
    """First order, 5 inner steps."""
    from speed_maml import omniglot

    return omniglot(steps=5, order=1)


@row("fomaml-84-5-steps", "meta-steps")
def fomaml_84() -> list[Contender]:
    """First order at 84x84."""
    from speed_maml import colour

    return colour(order=1)


@row("prompts-t5-base", "outer steps")
def prompts_t5_base() -> list[Contender]:
    """Prompt MAML with T5-base's shape: 10 tasks of 4 + 4 rows, a prompt of 100 tokens, second order."""
    from speed_prompts import t5_base

    return t5_base()


@row("prompts-smollm2", "outer steps")
def prompts_smollm2() -> list[Contender]:
    """The same with SmolLM2-135M's shape."""
    from speed_prompts import smollm2

    return smollm2()


@row("memory-omniglot-1-step", BYTES)
def memory_omniglot_1() -> list[Any]:
    """The most that the meta-step of maml-omniglot-1-step holds, and what is left after 50 episodes."""
    from speed_memory import omniglot

    return omniglot(steps=1)


@row("memory-omniglot-5-steps", BYTES)
def memory_omniglot_5() -> list[Any]:
    """With 5 inner steps."""
    from speed_memory import omniglot

    return omniglot(steps=5)


@row("memory-84-5-steps", BYTES)
def memory_84() -> list[Any]:
    """At 84x84, 5 inner steps."""
    from speed_memory import colour

    return colour()


@row("text-train", "tokens")
def text_train() -> list[Contender]:
    """Training on three tasks of rows as long as CS224N's, three times 64 rows an update (16 on a CPU)."""
    from speed_text import training

    return training()


@row("text-embed", "tokens")
def text_embed() -> list[Contender]:
    """Embedding all of these rows."""
    from speed_text import embedding

    return embedding()


@row("decision-float32", "decisions")
def decision_float32() -> list[Contender]:
    """A decision over 5 sources by 4 targets, M = 2: BERT-base, 16 x 128 tokens (a CPU: 4 layers of 128, 4 x 64)."""
    from speed_schedule import on_this_machine

    return on_this_machine(bf16=False)


@row("decision-bfloat16", "decisions")
def decision_bfloat16() -> list[Contender]:
    """The same under autocast."""
    from speed_schedule import on_this_machine

    return on_this_machine(bf16=True)


def table(results: list[Result]) -> str:
    lines = [
        "| row | contender | median/s | range | to the best peer | differs by | kernels / waits |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r.missing:
            lines.append(f"| {r.row} | {r.name} | skipped: needs {r.missing} | | | | |")
            continue
        ratio = f"{r.ratio:.2f}x" if r.ratio else ""
        unit = ROWS[r.row][0]
        differs = "" if r.difference is None else f"{r.difference:.0e}"
        low, median, high = (f"{value:,.{0 if value >= 100 else 3}f}" for value in (r.low, r.median, r.high))
        started = " / ".join(f"{count:,}" for count in (r.kernels, r.waits) if count is not None)
        name = f"{r.name} ({r.note})" if r.note else r.name
        lines.append(f"| {r.row} | {name} | {median} {unit} | {low} to {high} | {ratio} | {differs} | {started} |")
    return "\n".join(lines)


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(prog="run_speed.py", description="Speed beside other libraries, measured in one process.")
    groups = [name.partition("-")[0] for name in ROWS]
    groups = [name for name in dict.fromkeys(groups) if groups.count(name) > 1]
    parse = names("row", (*ROWS, *groups))
    about = f"{', '.join(ROWS)}; or all rows of {', '.join(groups)}"
    parser.add_argument("--rows", type=parse, default=list(ROWS), metavar="A,B|all", help=about)
    parser.add_argument("--repeats", type=positive_int, default=9, help="timings of each contender (default: 9)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results there, as JSON")
    parser.add_argument("--smoke", action="store_true", help="two short timings each, to see that all works")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen rows and print their table."""
    options = options_of(argv)
    settings = Settings(2, 0.01) if options.smoke else Settings(options.repeats, 0.5)
    where = surroundings()
    rows = [name for name in ROWS if {name, name.partition("-")[0]} & set(options.rows)]
    results: list[Result] = []
    held: list[Any] = []
    for name in rows:
        unit, contenders = ROWS[name]
        if unit == BYTES:
            from speed_memory import measure_memory

            held += measure_memory(name, contenders(), 5 if options.smoke else 50)
        else:
            results += measure(name, contenders(), settings)
    print("; ".join(f"{key} {value}" for key, value in where.items()))
    if results:
        print(f"\n{table(results)}")
    if held:
        from speed_memory import memory_table

        print(f"\n{memory_table(held)}")
    if options.out:
        content: dict[str, Any] = dict(where)
        content["rows"] = [{"unit": ROWS[result.row][0], **asdict(result)} for result in results]
        content["memory"] = [asdict(result) for result in held]
        write_file(options.out, json.dumps(content, indent=1) + "\n")


def surroundings() -> dict[str, str]:
    """Hardware and versions, in words."""
    import torch

    from metapretrain.training.environment import commit, versions

    kinds = [line.partition(":")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = (kinds[0].strip() if kinds else platform.processor()) or platform.machine()
    hardware = f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    peers = ("learn2learn", "higher", "torchopt", "easyfsl", "kornia", "torchvision", "transformers")
    found = {**versions(), **{name: version_of(name) for name in peers}}
    listed = ("python", "torch", "numpy", *peers)
    return {
        "hardware": hardware,
        "versions": ", ".join(f"{name} {found[name]}" for name in listed if found.get(name)),
        "commit": commit() or "unknown",
        "load": f"{os.getloadavg()[0]:.1f} at the start",
    }


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
