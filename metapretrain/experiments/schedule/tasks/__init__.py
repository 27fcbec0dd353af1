"""Pretraining and target tasks over one text encoder, for the scheduling benchmark."""

from metapretrain.experiments.schedule.tasks.base import Frame, PretrainingTask, TaskLoader, Tensors, to_device
from metapretrain.experiments.schedule.tasks.registry import (
    TASKS,
    Library,
    TaskInfo,
    load_schedule_tasks,
    made_schedule_tasks,
    register,
)

__all__ = ["TASKS", "Frame", "Library", "PretrainingTask", "TaskInfo", "TaskLoader", "Tensors"]
__all__ += ["load_schedule_tasks", "made_schedule_tasks", "register", "to_device"]
