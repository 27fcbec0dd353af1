"""Pretraining and target tasks over one text encoder, for the scheduling benchmark."""

from metapretrain.tasks.pretraining.base import Batches, PretrainingTask, to_device
from metapretrain.tasks.pretraining.frame import Batch, Frame
from metapretrain.tasks.pretraining.made import made_schedule_tasks
from metapretrain.tasks.pretraining.registry import TASKS, TaskInfo, load_schedule_tasks, schedule_texts

__all__ = [
    "TASKS",
    "Batch",
    "Batches",
    "Frame",
    "PretrainingTask",
    "TaskInfo",
    "load_schedule_tasks",
    "made_schedule_tasks",
    "schedule_texts",
    "to_device",
]
