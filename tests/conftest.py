"""What tests of runs by several processes share."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable

import pytest


def free_port() -> int:
    """A port below those that the system gives away by itself, of which gloo opens some at any moment."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


@pytest.fixture
def port() -> int:
    """A free port of this machine."""
    return free_port()


@pytest.fixture
def ranks() -> Callable[[int], list[dict[str, str]]]:
    """A function from a number of processes to the environment of each, one thread in all of them."""

    def environments(world: int) -> list[dict[str, str]]:
        usual = {**os.environ, "OMP_NUM_THREADS": "1"}
        if world == 1:
            return [usual]
        group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [{**usual, **group, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(world))]

    return environments
