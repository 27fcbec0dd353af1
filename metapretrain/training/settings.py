"""The choices of a training phase, the learning rate by step, and what a resume may not change in a configuration."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapretrain.checks import PRECISIONS, number, whole
from metapretrain.errors import InputError, one_of
from metapretrain.files import plain, read_json

SCHEDULES = ("constant", "cosine", "linear", "wsd")


def learning_rate(
    step: int, steps: int, *, peak: float, schedule: str = "cosine", warmup: int = 0, end: float = 0.0
) -> float:
    """Learning rate of update `step` (counted from 0) out of `steps`.

    `peak`: the rate after `warmup` updates of linear warm-up; `schedule`: `constant`; `cosine` or `linear` to the share
    `end` of the peak at the last step; `wsd`: linear decay over the last fifth of steps (MiniCPM, Hu et al., 2024).

    Example:
        >>> [round(learning_rate(s, 10, peak=1.0, warmup=2), 2) for s in (0, 1, 2, 9)]
        [0.5, 1.0, 1.0, 0.04]
    """
    one_of("schedule", schedule, SCHEDULES)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return peak * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done)))
    if schedule == "linear":
        return peak * (end + (1 - end) * (1 - done))
    if schedule == "wsd":
        return peak * min(1.0, (1 - done) / 0.2)
    return peak


OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class TrainSettings:
    """How :func:`metapretrain.training.train` runs.

    Args:
        steps: optimizer updates. `lr`: peak learning rate.
        optimizer: `sgd` (Nesterov momentum) or `adamw`. `momentum`: of `sgd`, in [0, 1).
        weight_decay: on matrices and kernels only; biases, norms and temperatures are not decayed.
        schedule: see :func:`metapretrain.training.settings.learning_rate`.
        lr_end: share of `lr` that `cosine` and `linear` end at.
        warmup: share of the steps spent on linear warm-up, in [0, 1); `warmup_steps`: their number, in its place.
        clip: largest gradient norm, or None. `accumulate`: batches per update.
        precision: `fp32`, `bf16` or `fp16` (GPU only). `device`: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        compile: compile the modules that say `compilable = True`.
        cuda_graph: record one update and replay it; None means wherever that is possible (a GPU per process, not fp16,
            no accumulation, over several processes no `local_batchnorm`).
        local_batchnorm: BatchNorm takes each process's own rows, as always in a step that averages its gradients.
        ema: decay of an exponential moving average of the weights of `step.model` and of the step's other weights
            (heads), which replaces them at the end; None for none.
        log_every: updates between two log lines; the only points where the device is waited for.
        checkpoint_every: updates between checkpoints; None means once a minute, at a log line.
        evaluate_every: updates between calls of `evaluate`; None means never. `seed`: of augmentation and dropout.

    Raises InputError: a value out of its range.

    Example:
        >>> TrainSettings(steps=10, lr=-1)
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: lr is -1; give a number above 0 and below 1e+30
    """

    steps: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup: float = 0.05
    clip: float | None = None
    accumulate: int = 1
    precision: str = "fp32"
    device: str = "auto"
    compile: bool = False
    cuda_graph: bool | None = None
    local_batchnorm: bool = False
    ema: float | None = None
    log_every: int = 50
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    seed: int = 0
    warmup_steps: int | None = None
    lr_end: float = 0.0

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("precision", self.precision, PRECISIONS)
        if not isinstance(self.device, str):
            raise InputError(f"device is a name such as 'cpu' or 'cuda:0', got {self.device!r}")
        number("lr", self.lr, above=0, below=1e30)  # optimizers compute with 10 lr in float32
        for name in ("steps", "accumulate", "log_every", "checkpoint_every", "evaluate_every"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, 1)
        for name in ("momentum", "warmup", "ema"):
            value = getattr(self, name)
            if name != "ema" or value is not None:
                number(name, value, least=0, below=1)
        number("weight_decay", self.weight_decay, least=0)
        number("lr_end", self.lr_end, least=0, most=1)
        if self.clip is not None and self.clip != math.inf:
            number("clip", self.clip, above=0)
        whole("seed", self.seed, 0, 2**32 - 1)
        if self.warmup_steps is not None:
            whole("warmup_steps", self.warmup_steps)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nest of dicts as one dict with dotted keys.

    Example:
        >>> flatten({"model": {"encoder": "resnet18"}, "seed": 0})
        {'model.encoder': 'resnet18', 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def check_same(run: Path, before: Any, given: Mapping[str, Any]) -> None:
    """Refuse to continue a run under another configuration.

    `before`, `given`: the configuration stored in `run` and that of now, as JSON has them.
    Raises InputError: another method, or changed keys, each named with both values (a part not stored: by its name).
    """
    if not isinstance(before, dict):
        raise InputError(f"{run} has no configuration in its config.json; choose another --out")
    if before.get("method") != given.get("method"):
        told = f"the checkpoint in {run} is from another method"
        raise InputError(f"{told}: {before.get('method')!r}, given {given.get('method')!r}; choose another --out")
    unknown = [key for key, value in given.items() if isinstance(value, Mapping) and key not in before]
    old, new = flatten(before), flatten({key: value for key, value in given.items() if key not in unknown})
    changed = [f"{key} was not kept (by an older version?)" for key in unknown]
    changed += [
        f"{key} was {_said(old, key)}, is {_said(new, key)}"
        for key in sorted({*old, *new})
        if _said(old, key) != _said(new, key)
    ]
    if changed:
        told = f"--resume with a changed configuration in {run}: {'; '.join(changed)}"
        raise InputError(f"{told}; give the same options again or choose another --out")


def _said(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True) if key in config else "not set"


def check_neighbours(root: Path, given: Mapping[str, Any]) -> None:
    """Refuse to put runs of two recipes, or of two folders of data, into one table.

    `root`: the folder of all runs of the table; `given`: the parts of the configuration that they share, by name.
    """
    for file in sorted(root.glob("*/config.json")):
        stored = (read_json(file) or {}).get("config")
        if not isinstance(stored, dict) or not given.keys() <= stored.keys():
            continue
        before, now = (flatten(plain({key: config[key] for key in given})) for config in (stored, given))
        key = next((key for key in sorted({*before, *now}) if before.get(key) != now.get(key)), None)
        if key is not None:
            raise InputError(
                f"{file.parent} in the same table has another configuration: {key} was {_said(before, key)}, is "
                f"{_said(now, key)}; give the same options again or choose another --out (or --tag, where there is one)"
            )
