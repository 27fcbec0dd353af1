"""What tests that start processes share, and how hypothesis draws."""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import forks

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


_frozen = 0


def pytest_runtest_setup() -> None:
    """What was imported by then is left out of every later garbage collection, which would take a second."""
    global _frozen
    if len(sys.modules) > _frozen + 100:
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


def pytest_unconfigure() -> None:
    """The processes that others are forks of end with the tests."""
    forks.close()


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


@pytest.fixture(scope="session")
def forked() -> Callable[..., None]:
    """:func:`tests.forks.ended`, for modules that are run as scripts too, which cannot import it."""
    return forks.ended


@pytest.fixture
def ranks() -> Callable[[int], list[dict[str, str]]]:
    """A function from a number of processes to the environment of each."""
    return environments


@pytest.fixture(scope="session")
def modules_after(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., set[str]]:
    """A function from code to what is imported after it, in a fork of a process that has imported torch alone."""
    file = tmp_path_factory.mktemp("modules") / "names"

    def after(code: str, quiet: bool = False) -> set[str]:
        file.unlink(missing_ok=True)
        told = f"import sys; open({str(file)!r}, 'w').write(' '.join(sys.modules))"
        done = forks.python("-c", f"exec({code!r}, {{}})\n{told}", warm=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0 and file.exists(), said or "ended early"
        assert not (quiet and said), said
        return set(file.read_text().split())

    return after


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
