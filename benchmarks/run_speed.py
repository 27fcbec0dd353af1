"""How fast the package is beside other libraries: every row measured with its peers in this process.

A row is a function of another module, imported when it is measured, that returns the contenders of one piece of work.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
from speed_measure import Result, Settings, measure

from metapretrain.errors import InputError
from metapretrain.files import write_file
from metapretrain.options import Parser, main_guard, names, positive_int

BYTES = "MiB"  # the unit of rows that are not timed


@dataclass(frozen=True)
class Row:
    """A piece of work: the unit that is counted, and ``module.function`` with its options, which returns contenders."""

    unit: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def contenders(self) -> list[Any]:
        """Of type Contender, or MemoryContender where the unit is BYTES."""
        module, _, name = self.function.partition(".")
        found: list[Any] = getattr(import_module(module), name)(**self.options)
        return found


ROWS = {
    # 5-way episodes of 1 shot and 15 queries: Omniglot's shape is 1,623 classes of 20, STL-10's is 10 of 500.
    "planning-omniglot": Row("episodes", "speed_episodes.planning", {"classes": 1623, "rows_a_class": 20}),
    "planning-large-classes": Row("episodes", "speed_episodes.planning", {"classes": 10, "rows_a_class": 500}),
    # The same, planned and read out of 28x28 images in memory, in this process.
    "loading-tensor": Row("episodes", "speed_episodes.loading", {"classes": 1623, "rows_a_class": 20}),
    # 128 x 3 x 96 x 96: random crop and mirror; with colour, grey and cutout; with colour, grey and blur.
    "augment-plain": Row("images", "speed_images.augmentation", {"preset": "plain"}),
    "augment-strong": Row("images", "speed_images.augmentation", {"preset": "strong"}),
    "augment-simclr": Row("images", "speed_images.augmentation", {"preset": "simclr"}),
    # ResNet-18 at 96 pixels.
    "train": Row("images", "speed_images.training"),
    # Loss and gradient of 128 embeddings of 512 numbers, 10 classes.
    "prototypical-loss": Row("steps", "speed_episodes.prototypical"),
    # CNN4-64, 28x28, 5-way 1-shot, 15 queries a class, 32 tasks (8 on a CPU); CNN4-32 with max-pooling, 84x84 in
    # colour, 4 tasks. Second order, then first.
    "maml-omniglot-1-step": Row("meta-steps", "speed_maml.omniglot", {"steps": 1, "order": 2}),
    "maml-omniglot-5-steps": Row("meta-steps", "speed_maml.omniglot", {"steps": 5, "order": 2}),
    "maml-84-5-steps": Row("meta-steps", "speed_maml.colour", {"order": 2}),
    "fomaml-omniglot-1-step": Row("meta-steps", "speed_maml.omniglot", {"steps": 1, "order": 1}),
    "fomaml-omniglot-5-steps": Row("meta-steps", "speed_maml.omniglot", {"steps": 5, "order": 1}),
    "fomaml-84-5-steps": Row("meta-steps", "speed_maml.colour", {"order": 1}),
    # Prompt MAML: 10 tasks of 4 + 4 rows, a prompt of 100 tokens, second order.
    "prompts-t5-base": Row("outer steps", "speed_prompts.t5_base"),
    "prompts-smollm2": Row("outer steps", "speed_prompts.smollm2"),
    # The most that the same meta-steps hold, and what is left after 50 episodes.
    "memory-omniglot-1-step": Row(BYTES, "speed_memory.omniglot", {"steps": 1}),
    "memory-omniglot-5-steps": Row(BYTES, "speed_memory.omniglot", {"steps": 5}),
    "memory-84-5-steps": Row(BYTES, "speed_memory.colour"),
    # CIFAR-FS's shape, 32 pixels: the recipes of run_fewshot.py; 2,000 episodes of kept features, 5-way.
    "fewshot-train-conv4": Row("images", "speed_fewshot.training", {"backbone": "conv4"}),
    "fewshot-train-resnet12": Row("images", "speed_fewshot.training", {"backbone": "resnet12"}),
    "fewshot-score-1-shot": Row("episodes", "speed_fewshot.scoring", {"shots": 1}),
    "fewshot-score-5-shots": Row("episodes", "speed_fewshot.scoring", {"shots": 5}),
    # Three tasks of rows as long as CS224N's: three times 64 rows an update (16 on a CPU); embedding all of them.
    "text-train": Row("tokens", "speed_text.training"),
    "text-embed": Row("tokens", "speed_text.embedding"),
    # 5 sources by 4 targets, M = 2: BERT-base, 16 x 128 tokens (a CPU: 4 layers of 128, 4 x 64); under autocast.
    "decision-float32": Row("decisions", "speed_schedule.on_this_machine", {"bf16": False}),
    "decision-bfloat16": Row("decisions", "speed_schedule.on_this_machine", {"bf16": True}),
    # Updates by 1, 2 and 4 processes, one global batch: 512 images (32 on a CPU), 64 tasks (8), text as above.
    "scale-images": Row("images", "speed_scale.scaling", {"kind": "images"}),
    "scale-tasks": Row("tasks", "speed_scale.scaling", {"kind": "tasks"}),
    "scale-tokens": Row("tokens", "speed_scale.scaling", {"kind": "tokens"}),
}


def table(results: list[Result]) -> str:
    lines = [
        "| row | contender | median/s | range | to the best peer | differs by | kernels / waits | TFLOP/s (limit) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r.missing:
            lines.append(f"| {r.row} | {r.name} | skipped: needs {r.missing} | | | | | |")
            continue
        ratio = f"{r.ratio:.2f}x" if r.ratio else ""
        unit = ROWS[r.row].unit
        differs = "" if r.difference is None else f"{r.difference:.0e}"
        low, median, high = (f"{value:,.{0 if value >= 100 else 3}f}" for value in (r.low, r.median, r.high))
        started = " / ".join(f"{count:,}" for count in (r.kernels, r.waits) if count is not None)
        name = f"{r.name} ({r.note})" if r.note else r.name
        cells = (r.row, name, f"{median} {unit}", f"{low} to {high}", ratio, differs, started)
        speed = "" if r.tflops is None or r.share is None else f"{r.tflops:.1f}, {r.share:.0%}"
        lines.append(f"| {' | '.join(cells)} | {speed} |")
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
    about = (
        "instead: the engine auto on a CPU beside its peers over many shapes, those whose name begins so (default: all)"
    )
    parser.add_argument("--shapes", nargs="?", const="", metavar="NAME", help=about)
    parser.add_argument("--smoke", action="store_true", help="two short timings each, to see that all works")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen rows and print their table."""
    options = options_of(argv)
    settings = Settings(2, 0.01) if options.smoke else Settings(options.repeats, 0.5)
    if options.out is not None and not options.out.parent.is_dir():
        raise InputError(f"no folder {options.out.parent} for --out; make it, or name another")
    where = surroundings()
    if options.shapes is not None:
        shape_rows(options.shapes, settings, options.out, where)
        return
    rows = [name for name in ROWS if {name, name.partition("-")[0]} & set(options.rows)]
    results: list[Result] = []
    held: list[Any] = []

    def keep(measured: Sequence[Result]) -> None:
        """Write what there is: a long measurement that is cut short leaves it."""
        if options.out:
            content: dict[str, Any] = dict(where)
            content["rows"] = [{"unit": ROWS[result.row].unit, **asdict(result)} for result in measured]
            content["memory"] = [asdict(result) for result in held]
            write_file(options.out, json.dumps(content, indent=1) + "\n")

    print("; ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    for name in rows:
        contenders = ROWS[name].contenders()
        if ROWS[name].unit == BYTES:
            from speed_memory import measure_memory, memory_table

            found: list[Any] = measure_memory(name, contenders, 5 if options.smoke else 50)
            held += found
            print(f"\n{memory_table(found)}", flush=True)
        else:
            timed = measure(name, contenders, settings, lambda found: keep([*results, *found]))
            results.extend(timed)
            print(f"\n{table(timed)}", flush=True)
        keep(results)


def shape_rows(prefix: str, settings: Settings, out: Path | None, where: Mapping[str, str]) -> None:
    """Measure the shapes whose names begin with `prefix`; what there is is written after each."""
    import speed_shapes

    names = [name for name in speed_shapes.shapes() if name.startswith(prefix)]
    if not names:
        raise InputError(f"no shape is named {prefix!r}...; there are: {'; '.join(speed_shapes.shapes())}")
    found = []
    print("; ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    for shape in speed_shapes.measure_shapes(names, settings.repeats, settings.seconds):
        found.append(shape)
        print(speed_shapes.table([shape]).splitlines()[-1], flush=True)
        if out is not None:
            write_file(out, json.dumps({**where, "shapes": [asdict(shape) for shape in found]}, indent=1) + "\n")
    print(f"\n{speed_shapes.table(found)}", flush=True)


def surroundings() -> dict[str, str]:
    """Hardware and versions, in words."""
    import torch

    from metapretrain.training.environment import commit, versions

    kinds = [line.partition(":")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = (kinds[0].strip() if kinds else platform.processor()) or platform.machine()
    hardware = f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()}; {hardware}"
    peers = ("jax", "learn2learn", "higher", "torchopt", "easyfsl", "kornia", "torchvision", "transformers")
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
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
