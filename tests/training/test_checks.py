"""What a step may give, what a run may not go on with, and settings out of their range."""

import math

import pytest
import torch
from torch import nn

from metapretrain.episodes import TaskStream
from metapretrain.errors import InputError
from metapretrain.training import RunFolder, TrainingError, TrainSettings, train


class Line(nn.Module):
    def __init__(self, size=1, loss=None):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))
        self.loss = loss

    def forward(self, batches):
        if self.loss is not None:
            return self.loss(self.w)
        return {name: (self.w.sum() - x).square().mean() for name, x in batches.items()}


def stream(steps=6):
    return TaskStream({"fit": [torch.ones(4), torch.zeros(4)]}, "longest", seed=0, steps=steps)


def settings(**changes):
    return TrainSettings(**{"steps": 6, "lr": 0.1, "device": "cpu", "checkpoint_every": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lr": "x"}, "lr"),
        ({"lr": True}, "lr"),
        ({"momentum": None}, "momentum"),
        ({"warmup": "x"}, "warmup"),
        ({"weight_decay": math.inf}, "weight_decay"),
        ({"clip": "x"}, "clip"),
        ({"device": None}, "device"),
        ({"device": torch.device("cpu")}, "device"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_settings_of_another_type_or_range_are_refused(changes, told):
    with pytest.raises(InputError, match=f"^{told} "):
        settings(**changes)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda w: {}, "none"),
        (lambda w: w.sum(), "Tensor"),
        (lambda w: {"fit": w * torch.ones(3)}, r"fit: \(3,\)"),
        (lambda w: {"fit": 1.0}, "fit: float"),
        (lambda w: {"other": w.sum()}, r"other: \(\)"),
    ],
)
def test_a_step_that_gives_no_scalar_loss_a_task_is_refused(loss, got):
    with pytest.raises(InputError, match=rf"\(fit\), got {got}"):
        train(Line(loss=loss), stream(), settings())


def test_nothing_to_train_and_nothing_to_average_are_refused():
    class Nothing(nn.Module):
        def forward(self, batches):
            return {"fit": torch.zeros(())}

    with pytest.raises(InputError, match="no parameter"):
        train(Nothing(), stream(), settings())
    with pytest.raises(InputError, match="ema"):
        train(Line(), stream(), settings(ema=0.9))


def test_weights_that_are_not_finite_after_a_finite_loss_end_the_run(tmp_path):
    """The square root's gradient at 0 is infinite and its value is not."""
    calls = []

    def loss(w):
        calls.append(1)
        return {"fit": torch.sqrt(w * 0).sum() if len(calls) == 4 else w.sum()}

    with (
        RunFolder.open(tmp_path, {"method": "line"}) as run,
        pytest.raises(TrainingError, match=r"weights w are NaN .* after step 4; .*step-00000002"),
    ):
        train(Line(loss=loss), stream(), settings(), run=run)
    with pytest.raises(TrainingError, match="after step 1; no checkpoint"):
        train(Line(loss=lambda w: {"fit": torch.sqrt(w * 0).sum()}), stream(1), settings(steps=1))


def interrupted(folder, **changes):
    with RunFolder.open(folder, {"method": "line"}) as run, pytest.raises(TrainingError, match="ended after 3"):
        train(Line(), stream(3), settings(**changes), run=run)


@pytest.mark.parametrize(
    "changes", [{"lr": 0.3}, {"weight_decay": 0.1}, {"steps": 2}, {"optimizer": "adamw"}, {"seed": 1}]
)
def test_a_resume_under_other_settings_is_refused(tmp_path, changes):
    interrupted(tmp_path)
    ((name, value),) = changes.items()
    with (
        RunFolder.open(tmp_path, {"method": "line"}, resume=True) as run,
        pytest.raises(InputError, match=f"{name} was .*, is {value}"),
    ):
        train(Line(), stream(), settings(**changes), run=run)


def test_a_resume_may_log_and_save_at_other_times(tmp_path):
    interrupted(tmp_path)
    with RunFolder.open(tmp_path, {"method": "line"}, resume=True) as run:
        report = train(Line(), stream(), settings(log_every=1, checkpoint_every=5), run=run)
    assert report.resumed_from == 2


@pytest.mark.parametrize("other", [Line(2), nn.Sequential(nn.Linear(1, 1))])
def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path, other):
    interrupted(tmp_path)
    with (
        RunFolder.open(tmp_path, {"method": "line"}, resume=True) as run,
        pytest.raises(TrainingError, match="is of another model: ") as error,
    ):
        train(other, stream(), settings(), run=run)
    assert "\n" not in str(error.value)
