"""Tasks as a scheduler and the training loop see them: loaders for updates, probes for utilities, losses to report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from metapretrain.models.text_encoders import TextEncoder
from metapretrain.scheduling.draws import generator, key
from metapretrain.scheduling.weights import Weights
from metapretrain.tasks.machine import Machine
from metapretrain.tasks.pretraining.base import PretrainingTask, to_device
from metapretrain.tasks.pretraining.frame import Batch
from metapretrain.training.devices import mixed_precision


class TaskLoader:
    """The batches of a task's training part, pass after pass: a loader of :class:`TaskStream`."""

    def __init__(self, task: PretrainingTask, batch_size: int, seed: int) -> None:
        self.task, self.batch_size, self.seed = task, batch_size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which pass the next iteration is."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.task.batches("train", batch_size=self.batch_size, seed=self.seed, epoch=self._epoch))


class ScheduleStep(nn.Module):
    """One encoder with a head for each task: `step({task: batch})` returns `{task: loss}`."""

    def __init__(self, encoder: TextEncoder, tasks: Mapping[str, PretrainingTask], seed: int) -> None:
        super().__init__()
        self.encoder, self.tasks = encoder, dict(tasks)
        heads = {}
        for name, task in tasks.items():  # a head's first weights depend on (seed, task) alone
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key(seed, "head", name) % 2**63)
                heads[name] = task.head(encoder.features)
        self.heads = nn.ModuleDict(heads)

    def loss(self, name: str, batch: Batch) -> Tensor:
        """The loss of one task's batch."""
        return self.tasks[name].loss(self.encoder, self.heads[name], batch)

    def joint_losses(self, batches: Mapping[str, Sequence[Batch]]) -> dict[str, Tensor]:
        """Losses (M,) of M batches of each task, whose sequences the encoder takes all at once."""
        flat = [(name, batch) for name, listed in batches.items() for batch in listed]
        states = self.encoder.hidden(_together([batch for _, batch in flat]))
        found: dict[str, list[Tensor]] = {name: [] for name in batches}
        row = 0
        for name, batch in flat:
            rows, width = batch["input_ids"].shape
            own = states[row : row + rows, :width]
            found[name].append(self.tasks[name].loss_of(self.encoder, self.heads[name], own, batch))
            row += rows
        return {name: torch.stack(losses) for name, losses in found.items()}

    def forward(self, batches: Mapping[str, Batch]) -> dict[str, Tensor]:
        return {name: self.loss(name, batch) for name, batch in batches.items()}


class TaskProbe:
    """A task for :class:`metapretrain.scheduling.UtilityScheduler`; batches depend on the generator alone.

    Args:
        step: encoder and heads.
        name: of the task.
        split: the part that batches are drawn from.
        batch_size: examples of a batch.
        machine: the precision of losses is that of the updates.
    """

    def __init__(self, step: ScheduleStep, name: str, split: str, batch_size: int, machine: Machine) -> None:
        self.step, self.name, self.split, self.batch_size, self.machine = step, name, split, batch_size, machine

    def sample(self, generator: torch.Generator) -> Batch:
        """A batch that the generator draws, where the weights are."""
        return to_device(self.step.tasks[self.name].sample(self.split, self.batch_size, generator), self.step)

    def loss(self, batch: Batch) -> Tensor:
        """The scalar loss of a batch, float32."""
        with mixed_precision(self.machine.device, self.machine.precision):
            return self.step.loss(self.name, batch).float()


class JointProbe(TaskProbe):
    """The same with M batches in one forward pass."""

    def loss_many(self, batches: Sequence[Batch]) -> Tensor:
        """Losses (M,), float32."""
        with mixed_precision(self.machine.device, self.machine.precision):
            return self.step.joint_losses({self.name: batches})[self.name].float()


class Losses:
    """Mean losses of some tasks over a few batches, without a trace in the model or in generators.

    Args:
        step: encoder and heads.
        probes: a probe a task.
        batches: how many of each.
        seed: what the draws depend on.
    """

    def __init__(self, step: ScheduleStep, probes: Mapping[str, TaskProbe], batches: int, *seed: int | str) -> None:
        self.weights, self.probes, self.batches, self.seed = Weights(step), dict(probes), batches, seed
        self._kept: tuple[int, dict[str, list[Batch]]] = (-1, {})

    def __call__(self, number: int = 0) -> dict[str, float]:
        """The losses {task: mean} on draw `number`."""
        means = []
        with self.weights.untouched(), torch.no_grad():
            for name, batches in self._drawn(number).items():
                losses = []
                for place, batch in enumerate(batches):
                    self.weights.reset(key(*self.seed, number, name, place))
                    losses.append(self.probes[name].loss(batch))
                means.append(torch.stack(losses).mean())
        return dict(zip(self.probes, torch.stack(means).tolist(), strict=True))

    def _drawn(self, number: int) -> dict[str, list[Batch]]:
        """The batches of a draw; those of the last one are kept, as every evaluation asks for the same."""
        if self._kept[0] != number:
            drawn = {}
            for name, probe in self.probes.items():
                draws = generator(*self.seed, number, name)
                drawn[name] = [probe.sample(draws) for _ in range(self.batches)]
            self._kept = number, drawn
        return self._kept[1]


def _together(batches: Sequence[Batch]) -> Batch:
    """The sequences of all batches as one of the width of the widest; what was added counts as padding."""
    width = max(batch["input_ids"].shape[1] for batch in batches)
    names = ("input_ids", "attention_mask", *["token_type_ids"] * ("token_type_ids" in batches[0]))
    return {
        name: torch.cat([nn.functional.pad(batch[name], (0, width - batch[name].shape[1])) for batch in batches])
        for name in names
    }
