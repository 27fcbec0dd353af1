"""Pretraining and target tasks over one text encoder, for the scheduling benchmark."""

from metapretrain.tasks.pretraining.base import Batches, PretrainingTask, to_device
from metapretrain.tasks.pretraining.frame import Batch, Frame
from metapretrain.tasks.pretraining.made import made_schedule_tasks

__all__ = ["Batch", "Batches", "Frame", "PretrainingTask", "made_schedule_tasks", "to_device"]
