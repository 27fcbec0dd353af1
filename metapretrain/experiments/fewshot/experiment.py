"""Few-shot learning on the disk: one run folder a method and seed, resumable, tested once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metapretrain.data.few_shot import FewShotData, check_disjoint
from metapretrain.data.images import ImageSet
from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import EpisodeResult, few_shot_accuracy
from metapretrain.experiments.base import Machine, RunFolders, check_seeds
from metapretrain.experiments.fewshot.learning import (
    FROZEN_SEED,
    Learning,
    MetaStep,
    TaskBatches,
    build_learner,
    fit,
    score_episodes,
    settings_of,
)
from metapretrain.files import one_line_errors, write_whole
from metapretrain.models.saved import LEARNER, SavedLearner, SavedModel, is_transductive, load
from metapretrain.report.layout import Layout
from metapretrain.training import RunFolder
from metapretrain.training.devices import wait_for_all


@dataclass(frozen=True)
class Pretrained:
    """The row of an encoder that another benchmark has trained: its features, nearest support prototype."""

    run: Path

    @property
    def pretraining(self) -> str | None:
        """None: it shares nothing with other rows."""
        return None


@dataclass(frozen=True)
class FewShot(RunFolders):
    """What all rows of a few-shot table share; see :class:`metapretrain.experiments.base.RunFolders`.

    Args:
        dataset: name of the data.
        data: its three parts.
        tested: ways, shots and queries of validation and test episodes.
        backbone: see :data:`metapretrain.models.encoders.BACKBONES`; with `suffix` it names the folder.
        out: parent of all runs.
        test_episodes, validation_episodes: how many, the same ones for every run.
        resume: go on with runs that were cut short and keep finished ones.
        figures: a seed: curves are drawn; None: they are not.
        layout: of the table; None: a column for each metric.
    """

    dataset: str
    data: FewShotData
    tested: EpisodeSpec
    backbone: str
    machine: Machine
    out: Path
    test_episodes: int = 600
    validation_episodes: int = 200
    resume: bool = False
    suffix: str = ""
    figures: int | None = 0
    layout: Layout | None = None

    @property
    def setting(self) -> str:
        """Such as 5w1s."""
        (ways, _), (shots, _), _ = self.tested.ranges
        return f"{ways}w{shots}s"

    @property
    def recipe(self) -> str:
        """Name of the backbone, and of what else sets these runs apart."""
        return f"{self.backbone}{self.suffix}"

    @property
    def names(self) -> dict[str, str]:
        """What all rows are of."""
        return {"benchmark": "fewshot", "dataset": f"{self.dataset}-{self.setting}", "recipe": self.recipe}

    @property
    def files(self) -> dict[str, Any]:
        """The files that were read, with checksums."""
        return {**self.data.train.files, **self.data.validation.files, **self.data.test.files}

    def plan(self, methods: Mapping[str, Learning | Pretrained]) -> list[str]:
        """Return one line a run with its budget: what `--dry-run` prints.

        Raises:
            InputError: a part has too few classes or images for the episodes.
        """
        self._check_episodes(methods)
        lines = []
        for name, method in methods.items():
            if isinstance(method, Pretrained):
                lines.append(f"{_name(name, method)}: no training, {self.test_episodes:,} test episodes")
                continue
            spec = method.spec(self.tested, len(self.data.train.classes))
            (ways, _), (shots, _), (queries, _) = spec.ranges
            lines.append(
                f"{name}: {method.updates:,} updates of {method.tasks} episodes ({ways}-way {shots}-shot, {queries} "
                f"queries a class), {method.updates * method.encoder_passes(spec):,} encoder passes; "
                f"{self.validation_episodes:,} validation and {self.test_episodes:,} test episodes"
            )
        return lines

    def check(self, methods: Mapping[str, Learning | Pretrained], seeds: Sequence[int]) -> None:
        """Refuse now, before anything is trained, what :meth:`row` would refuse when its turn comes.

        Raises:
            InputError: too few classes or images, a value, backbone or learner that would be refused, a run that is
                there and `resume` is off, or that has another configuration; a seed of more than 32 bits.
        """
        check_seeds(seeds)
        self._check_episodes(methods)
        for name, method in methods.items():
            if isinstance(method, Learning):
                spec = method.spec(self.tested, len(self.data.train.classes))
                learner = build_learner(method, self.backbone, self.data, spec.ranges[0][1], 0)
                MetaStep(learner, self.data.train.images, compile=self.machine.compile)
                settings_of(method, 0, self.machine)
            else:
                self._encoder(method)
            for seed in seeds:
                if (self.path(_name(name, method), seed) / "config.json").is_file():
                    self.open(_name(name, method), method, seed).close()

    def _check_episodes(self, methods: Mapping[str, Learning | Pretrained]) -> None:
        """Refuse episodes that a part has too few classes or images for."""
        for part in (self.data.validation, self.data.test):
            EpisodeSampler(part.labels, self.tested, 1, seed=0)
        for method in methods.values():
            if isinstance(method, Learning):
                spec = method.spec(self.tested, len(self.data.train.classes))
                TaskBatches(self.data.train.labels, spec, method.tasks, seed=0, world_size=self.machine.world)

    def row(self, name: str, method: Learning | Pretrained, seed: int) -> dict[str, Any]:
        """Run one row for one seed; a finished one is kept if `resume` is set."""
        name = _name(name, method)
        if (done := self.kept(name, method, seed)) is not None:
            return done
        with self.open(name, method, seed) as run:
            if isinstance(method, Pretrained):
                tested = self._score(method)
                return self._finish(run, name, seed, tested, {}, {}, {"transductive": False}, lambda: None)
            step, report = fit(
                method,
                self.backbone,
                self.data,
                self.tested,
                seed,
                self.machine,
                validation_episodes=self.validation_episodes,
                run=run,
            )
            if self.machine.rank != 0:
                wait_for_all(self.machine.world)  # for the result
                return {}
            tested = score_episodes(step.learner, self.data.test, self.tested, self.test_episodes)
            spec = method.spec(self.tested, len(self.data.train.classes))
            budget = {
                "encoder_passes": report.steps * method.encoder_passes(spec),
                "updates": report.steps,
                "best_step": report.best.step,
            }
            extra = {
                "transductive": is_transductive(step.learner),
                "updates_per_s": round(report.updates_per_second, 2),
            }
            validated = {"validation_accuracy": report.best.value}

            def save() -> None:
                self._save(run, step.learner)

            return self._finish(run, name, seed, tested, validated, budget, extra, save)

    def _score(self, method: Pretrained) -> EpisodeResult:
        encode = self._encoder(method).encode
        return few_shot_accuracy(encode, self.data.test, self.tested, self.test_episodes, FROZEN_SEED["test"])

    def _encoder(self, method: Pretrained) -> SavedModel | SavedLearner:
        """The encoder of a finished run, which knows no class of the test and encodes images one by one."""
        model = load(method.run, self.machine.device)
        if isinstance(model, SavedLearner) and is_transductive(model.learner):
            raise InputError(
                f"{method.run}: its encoder works inside an episode only, by batch statistics; name a run of protonet, "
                "or of another benchmark"
            )
        seen = ImageSet(torch.empty(0, 1, 1, 1, dtype=torch.uint8), torch.empty(0).long(), model.classes)
        check_disjoint({"the encoder's training": seen, "test": self.data.test})
        return model

    def config(self, method: Learning | Pretrained) -> dict[str, Any]:
        """Return how a row is tested, its data, and how it learns."""
        data = self.data
        config: dict[str, Any] = {
            "tested": asdict(self.tested),
            "episodes": {"validation": self.validation_episodes, "test": self.test_episodes},
            "data": {"counts": data.counts, "files": self.files},
        }
        if isinstance(method, Learning):
            config |= {
                "choices": asdict(method),
                "backbone": self.backbone,
                "model": {
                    "encoder": self.backbone,
                    "stem": "standard",
                    "head": None,
                    "classes": list(data.train.classes),
                    "channels": data.train.channels,
                    "image_size": data.train.image_size,
                    "mean": list(data.mean),
                    "std": list(data.std),
                },
            }
        return config

    def _save(self, run: RunFolder, learner: nn.Module) -> None:
        """Write the learner's weights, which `metapretrain.load` reads."""
        from safetensors.torch import save

        tensors = {name: value.detach().cpu().contiguous() for name, value in learner.state_dict().items()}
        with one_line_errors(f"cannot write {LEARNER} in {run.path}"):
            write_whole(run.path / LEARNER, save(tensors))

    def _finish(
        self,
        run: RunFolder,
        name: str,
        seed: int,
        tested: EpisodeResult,
        validated: Mapping[str, float],
        budget: Mapping[str, int],
        extra: Mapping[str, Any],
        save: Callable[[], None],
    ) -> dict[str, Any]:
        metrics = {"test_accuracy": tested.mean, "test_ci95": tested.ci95, "test_sd": tested.sd, **validated}
        counts = {**self.data.counts, "test_episodes": tested.n}
        return self.finish(run, name, seed, metrics, budget, {**extra, "counts": counts}, save)


def _name(name: str, method: Learning | Pretrained) -> str:
    """The method's name in the table: that of an encoder says which run it is from."""
    if not isinstance(method, Pretrained):
        return name
    run = method.run.resolve()
    if not (run / "config.json").is_file():
        raise InputError(f"{method.run} is not a run folder: it has no config.json; name one below runs/")
    return f"{name}-{run.name}"
