"""What the model sees next: episodes, shuffled batches and streams of several tasks."""

from metapretrain.episodes.plan import EpisodePlan
from metapretrain.episodes.sampler import EpisodeSampler
from metapretrain.episodes.spec import EpisodeSpec

__all__ = ["EpisodePlan", "EpisodeSampler", "EpisodeSpec"]
