"""What a training step may give, and what may not change when a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.training.checkpoint import Checkpoint
from metapretrain.training.settings import TrainSettings

# How a run is done may change from session to session; what it computes may not.
FREE = {"device", "compile", "cuda_graph", "log_every", "checkpoint_every", "evaluate_every"}


class TrainingError(InputError):
    """Training cannot go on; the line names the step and the last good checkpoint."""


def check_losses(losses: Any, batch: Any) -> dict[str, Tensor]:
    """Return what a step gave, if it is one scalar tensor for each task of the batch; waits for no device.

    Raises:
        InputError: it is not.

    Example:
        >>> check_losses({"fit": torch.ones(3)}, {"fit": None})
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: a step returns {task: scalar loss} for the tasks of its batch (fit), \
got fit: (3,)
    """
    right = isinstance(losses, Mapping) and losses and losses.keys() <= batch.keys()
    if right and all(isinstance(loss, Tensor) and loss.ndim == 0 for loss in losses.values()):
        return dict(losses)
    got = type(losses).__name__
    if isinstance(losses, Mapping):
        got = ", ".join(f"{name}: {_said(loss)}" for name, loss in losses.items()) or "none"
    tasks = ", ".join(map(str, batch))
    raise InputError(f"a step returns {{task: scalar loss}} for the tasks of its batch ({tasks}), got {got}")


def _said(loss: Any) -> str:
    return str(tuple(loss.shape)) if isinstance(loss, Tensor) else type(loss).__name__


def refuse_bad_weights(module: nn.Module, step: int, last_good: str) -> None:
    """Refuse weights with NaN or infinity; waits for the device.

    A finite loss may have a gradient that is not: the weights show it one update before the loss does.

    Raises:
        TrainingError: some are; the first parameter is named.
    """
    named = [(name, value.detach()) for name, value in module.named_parameters() if value.is_floating_point()]
    if not named:
        return
    finite = torch.stack([value.isfinite().all() for _, value in named]).tolist()
    bad = next((name for (name, _), good in zip(named, finite, strict=True) if not good), None)
    if bad is not None:
        raise TrainingError(
            f"the weights {bad} are NaN or infinite after step {step}; {last_good}; "
            "lower the learning rate, clip gradients (clip=1.0) or use precision fp32"
        )


def check_settings(stored: Any, settings: TrainSettings) -> None:
    """Refuse to go on from a checkpoint under settings that would have trained otherwise.

    Args:
        stored: of the checkpoint; None: one that does not tell.

    Raises:
        InputError: some differ; each is named with both values.

    Example:
        >>> check_settings({"lr": 0.1}, TrainSettings(steps=1, lr=0.2))
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: the checkpoint was trained with other settings: lr was 0.1, is 0.2; \
give the same again or start in another folder
    """
    if not isinstance(stored, Mapping):
        return
    changed = [
        f"{name} was {stored[name]}, is {value}"
        for name, value in asdict(settings).items()
        if name not in FREE and name in stored and stored[name] != value
    ]
    if changed:
        raise InputError(
            f"the checkpoint was trained with other settings: {'; '.join(changed)}; "
            "give the same again or start in another folder"
        )


def load_states(found: Checkpoint, parts: Mapping[str, Any]) -> None:
    """Give each part (a module, an optimizer or None) the state that the checkpoint has under its name.

    Raises:
        TrainingError: a state is of another model.
    """
    try:
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(found.state[name])
    except (RuntimeError, ValueError, KeyError) as error:  # its text has a line for each tensor
        raise TrainingError(
            f"the checkpoint {found.path} is of another model: {' '.join(str(error).split())}; "
            "give the model of the run again or start in another folder"
        ) from None
