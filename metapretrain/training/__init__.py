"""The training loop, checkpoints and the run folder."""

from metapretrain.files import CheckpointError
from metapretrain.training.checkpoint import Checkpoint, load_latest, save
from metapretrain.training.engine import TrainingError
from metapretrain.training.loop import KeepBest, Stream, TrainReport, train
from metapretrain.training.run_folder import RunFolder
from metapretrain.training.settings import TrainSettings, learning_rate

__all__ = ["Checkpoint", "CheckpointError", "KeepBest", "RunFolder", "Stream", "TrainReport", "TrainSettings"]
__all__ += ["TrainingError", "learning_rate", "load_latest", "save", "train"]
