"""What tests of run folders read out of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metapretrain.training.logs import read_metrics

CONFIG = {"method": "prl-query", "seed": 0, "lr": 0.1, "model": {"encoder": "resnet18", "mean": (0.5, 0.5)}}


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """All (step, value) of `tag`, sorted: files of one second are read in the order of their names."""
    return sorted((event.step, event.value) for event in events(run).Scalars(tag))


def lines(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["value"]) for line in read_metrics(run)]


def one_line(error: BaseException) -> str:
    said = str(error)
    assert "\n" not in said
    return said


def figure() -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(2, 1))
    drawn.subplots().plot([0, 1], [1, 0])
    return drawn


def projector(run: Path) -> Any:
    from google.protobuf import text_format
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    return text_format.Parse((run / "projector_config.pbtxt").read_text(), ProjectorConfig()).embeddings
