"""What tests that start processes share, and how hypothesis draws."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def _processes_import_this_checkout() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield


def free_port() -> int:
    """A port below those that the system gives away by itself, of which gloo opens some at any moment."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


@pytest.fixture
def port() -> int:
    """A free port of this machine."""
    return free_port()


def environments(world: int) -> list[dict[str, str]]:
    """The environment of each of so many processes, one thread in all of them."""
    outer = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    usual = {name: value for name, value in os.environ.items() if name not in outer} | {"OMP_NUM_THREADS": "1"}
    if world == 1:
        return [usual]
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**usual, **group, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(world))]


@pytest.fixture
def ranks() -> Callable[[int], list[dict[str, str]]]:
    """A function from a number of processes to the environment of each."""
    return environments


@pytest.fixture
def registries() -> Iterator[None]:
    """What a test registers is forgotten after it, but for what the scripts register as they are imported."""
    import run_schedule  # noqa: F401

    from metapretrain.data.registry import DATASETS
    from metapretrain.experiments.images.objectives import OBJECTIVES
    from metapretrain.experiments.schedule.tasks import TASKS
    from metapretrain.models.encoders import ENCODERS
    from metapretrain.models.saved import LEARNERS
    from metapretrain.scheduling import SCHEDULERS

    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (known, dict(known)) for known in (SCHEDULERS, TASKS, OBJECTIVES, DATASETS, LEARNERS, ENCODERS)
    ]
    yield
    for known, before in kept:
        known.clear()
        known.update(before)
