"""A step that waits for the device is not recorded as a CUDA graph: no few-shot update does."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fewshot_experiment import FewShotRecipe, ImageBatches
from fewshot_learning import EPISODES, EpisodeStacks, FewShotMethod, MetaStep, build_learner
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.run_fewshot import methods_of
from metapretrain.data.few_shot import PARTS, FewShotData
from metapretrain.data.images import ImageSet
from metapretrain.episodes import EpisodeSpec
from metapretrain.models.saved import adapts

WAITS = {  # operations that a GPU has to be waited for: their result's values or size are needed at once
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"),
    *("_linalg_check_errors", "linalg_cholesky", "linalg_inv", "is_nonzero"),
}
ON_CPU = ("is_cpu", "one_hot")  # lines that look at values on a CPU alone
WATCHED = ("metapretrain/", "/fewshot_learning.py", "/test_fewshot_waits.py")  # whose lines are told
ROWS = methods_of(5)


class Watch(TorchDispatchMode):
    """Collects the lines of the library that would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        masks = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in WAITS or masks:
            own = [f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in traceback.extract_stack()]
            line = [place for place in own if any(part in place for part in WATCHED)][-2]
            self.found += [f"{name} {line}"] * (not any(word in line for word in ON_CPU))
        return function(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    with Watch() as watch:
        yield watch.found


def data(channels: int) -> FewShotData:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (72, channels, 16, 16), dtype=torch.uint8, generator=random)
    labels = torch.arange(6).repeat_interleave(12)
    return FewShotData.of({p: ImageSet(images, labels, [f"{p} {n}" for n in range(6)], "made", p) for p in PARTS})


def step_and_batch(method: FewShotMethod, backbone: str, channels: int) -> tuple[MetaStep, dict[str, Any]]:
    given = data(channels)
    spec = FewShotRecipe(EpisodeSpec(5, 1, 2), backbone).training(method, given)
    learner = build_learner(method, backbone, given, spec.ranges[0][1], 0)
    distort = method.distortion(size=16, channels=channels)
    step = MetaStep(learner, given.train.images, distort, False, 6 * method.turns, method.updates)
    fading = (method.inner_steps, round(method.fade * method.updates))
    labels = given.train.labels
    supervised = method.learner == "supervised"
    batches: Any = (
        ImageBatches(labels, 8, seed=0) if supervised else EpisodeStacks(labels, spec, 2, seed=0, fading=fading)
    )
    return step.train(), {EPISODES: next(iter(batches))}


@pytest.mark.parametrize(("channels", "backbone"), [(1, "conv4"), (3, "conv4"), (3, "resnet12")])
@pytest.mark.parametrize("name", ROWS)
def test_no_update_waits_for_the_device(name: str, channels: int, backbone: str) -> None:
    method = methods_of(5, channels == 3, backbone, 16)[name]
    if backbone == "resnet12" and adapts(method.learner):
        pytest.skip("not a row of the tables")
    tasks, ways = (8, None) if method.learner == "supervised" else (2, method.ways and 5)
    for turns in (False, True) if method.learner == "supervised" else (False,):
        step, batch = step_and_batch(
            replace(method, tasks=tasks, ways=ways, queries=2, turns=turns), backbone, channels
        )
        with watched() as found:
            step(batch)[EPISODES].backward()
        assert not found


def test_the_watch_sees_what_waits() -> None:
    x, square = torch.tensor([1.0, 0.0]), torch.eye(2)
    for call in (
        lambda: x.sum().item(),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: x.unique(),
        lambda: torch.linalg.solve(square, x),
        lambda: torch.linalg.cholesky(square),
    ):
        with watched() as found:
            call()
        assert found
    with watched() as found:
        torch.linalg.solve_ex(square, x)
    assert not found
