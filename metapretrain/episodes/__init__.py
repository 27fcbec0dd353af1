"""Episodes, shuffled batches and streams of several tasks.

Planning an episode (which classes, which rows) is separate from reading its data, and is a pure function of
(seed, epoch, index, block size).
"""

from metapretrain.episodes.dataset import (
    Batch,
    Episode,
    EpisodeDataset,
    EpisodeLoader,
    identity,
    split_support_query,
    stack,
)
from metapretrain.episodes.groups import group_agreement, group_tasks, tidy_groups
from metapretrain.episodes.interop import from_taskset, to_metadataset, to_taskset
from metapretrain.episodes.sampler import EpisodePlan, EpisodeSampler, EpisodeSpec
from metapretrain.episodes.streams import Scheduler, ShuffledBatches, TaskStream

__all__ = ["Batch", "Episode", "EpisodeDataset", "EpisodeLoader", "EpisodePlan", "EpisodeSampler", "EpisodeSpec"]
__all__ += ["Scheduler", "ShuffledBatches", "TaskStream", "from_taskset", "group_agreement", "group_tasks", "identity"]
__all__ += ["split_support_query", "stack", "tidy_groups", "to_metadataset", "to_taskset"]
