"""The choices of one training phase."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from metapretrain.devices import PRECISIONS
from metapretrain.errors import InputError, one_of
from metapretrain.training.schedule import SCHEDULES

OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class TrainSettings:
    """How :func:`metapretrain.training.train` runs.

    Args:
        steps: optimizer updates.
        lr: peak learning rate.
        optimizer: `sgd` (Nesterov momentum) or `adamw`.
        momentum: of `sgd`, in [0, 1).
        weight_decay: on matrices and kernels only; biases, norms and temperatures are not decayed.
        schedule: see :func:`metapretrain.training.schedule.learning_rate`.
        warmup: share of the steps spent on linear warm-up, in [0, 1).
        clip: largest gradient norm, or None.
        accumulate: batches an update.
        precision: `fp32`, `bf16` or `fp16` (GPU only).
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        compile: compile the modules that say `compilable = True`.
        cuda_graph: record one update and replay it; None means wherever that is possible (one CUDA process, not fp16,
            no accumulation).
        local_batchnorm: over several processes, BatchNorm takes each one's own rows and not those of all, as it
            always does in a step that averages its gradients itself.
        ema: decay of an exponential moving average of `step.model`, which replaces it at the end; None for none.
        log_every: updates between two log lines; the only points where the device is waited for.
        checkpoint_every: updates between checkpoints; None means once a minute, at a log line.
        evaluate_every: updates between calls of `evaluate`; None means never.
        seed: of augmentation and dropout.

    Raises:
        InputError: a value out of its range.

    Example:
        >>> TrainSettings(steps=10, lr=-1)
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: lr must be a number above 0 and below 1e30, got -1
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

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("precision", self.precision, PRECISIONS)
        if not isinstance(self.device, str):
            raise InputError(f"device is a name such as 'cpu' or 'cuda:0', got {self.device!r}")
        if not _is_real(self.lr) or not 0 < self.lr < 1e30:  # optimizers compute with 10 lr in float32
            raise InputError(f"lr must be a number above 0 and below 1e30, got {self.lr!r}")
        for name in ("steps", "accumulate", "log_every", "checkpoint_every", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("momentum", "warmup", "ema"):
            value = getattr(self, name)
            if (name != "ema" or value is not None) and (not _is_real(value) or not 0 <= value < 1):
                raise InputError(f"{name} must lie in [0, 1), got {value!r}")
        if not _is_real(self.weight_decay) or not 0 <= self.weight_decay < float("inf"):
            raise InputError(f"weight_decay must be at least 0 and finite, got {self.weight_decay!r}")
        if self.clip is not None and (not _is_real(self.clip) or not self.clip > 0):
            raise InputError(f"clip must be above 0, got {self.clip!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise InputError(f"seed must be a whole number from 0 to {2**32 - 1}, got {self.seed!r}")


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
