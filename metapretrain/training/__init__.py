"""The training loop, checkpoints and the run folder."""

from metapretrain.training.checkpoint import Checkpoint, CheckpointError, load_latest, save
from metapretrain.training.checks import TrainingError
from metapretrain.training.loop import Stream, TrainReport, train
from metapretrain.training.run_folder import RunFolder
from metapretrain.training.schedule import learning_rate
from metapretrain.training.settings import TrainSettings

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "RunFolder",
    "Stream",
    "TrainReport",
    "TrainSettings",
    "TrainingError",
    "learning_rate",
    "load_latest",
    "save",
    "train",
]
