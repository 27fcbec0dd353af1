"""Few-shot learning on the disk: one run folder a method and seed, resumable, tested once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from metapretrain.data.few_shot import FewShotData, check_disjoint
from metapretrain.data.images import ImageSet
from metapretrain.episodes import EpisodePlan, EpisodeSampler
from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import EpisodeResult, evaluate_embeddings
from metapretrain.experiments.base import Experiment, Outcome, check_seeds
from metapretrain.experiments.fewshot.learning import (
    FROZEN_SEED,
    SUPERVISED,
    EpisodeStacks,
    FewShotContext,
    FewShotMethod,
    FewShotRecipe,
    ImageBatches,
    MetaStep,
    SavedEncoder,
    build_learner,
    centre,
    meta_training,
    score_episodes,
    settings_of,
)
from metapretrain.experiments.images.data import describe
from metapretrain.experiments.saved import load_encoder
from metapretrain.files import load_tensors, one_line_errors, write_whole
from metapretrain.models.pretrained import features_centre, kept_features
from metapretrain.models.saved import LEARNER, SavedLearner, SavedModel, is_transductive
from metapretrain.training import TrainReport, train

FewShotRow = FewShotMethod | SavedEncoder


@dataclass(frozen=True)
class TrainedLearner:
    """The step with the learner's best weights, and what training did; a saved encoder has neither."""

    step: MetaStep | None = None
    report: TrainReport | None = None


@dataclass(frozen=True)
class FewShotExperiment(Experiment[FewShotRecipe, FewShotData, FewShotRow, TrainedLearner, EpisodeResult]):
    """A few-shot experiment: see :class:`metapretrain.experiments.base.Experiment`.

    `plans`: the test episodes; None: those that the recipe draws.
    """

    plans: Sequence[EpisodePlan] | None = None

    @property
    def files(self) -> dict[str, Any]:
        return {**self.data.train.files, **self.data.validation.files, **self.data.test.files}

    def plan(self, methods: Mapping[str, FewShotRow]) -> list[str]:
        self._check_episodes(methods)
        lines = []
        for name, method in methods.items():
            if isinstance(method, SavedEncoder):
                lines.append(f"{_name(name, method)}: no training, {self.recipe.test_episodes:,} test episodes")
                continue
            spec = self.recipe.training(method, self.data)
            (ways, _), (shots, _), (queries, _) = spec.ranges
            if method.learner == SUPERVISED:
                lines.append(
                    f"{name}: {method.updates:,} updates of {method.tasks} images, once for all settings; "
                    f"{self.recipe.test_episodes:,} test episodes"
                )
                continue
            lines.append(
                f"{name}: {method.updates:,} updates of {method.tasks} episodes ({ways}-way {shots}-shot, {queries} "
                f"queries per class), {method.updates * method.encoder_passes(spec):,} encoder passes; "
                f"{self.recipe.validation_episodes:,} validation and {self.recipe.test_episodes:,} test episodes"
            )
        return lines

    def check(self, methods: Mapping[str, FewShotRow], seeds: Sequence[int]) -> None:
        check_seeds(seeds)
        self._check_episodes(methods)
        for name, method in methods.items():
            self.check_row(name, method)
            for seed in seeds:
                if (self.path(_name(name, method), seed) / "config.json").is_file():
                    self.open(_name(name, method), method, seed).close()

    def _check_episodes(self, methods: Mapping[str, FewShotRow]) -> None:
        for part in (self.data.validation, self.data.test):
            EpisodeSampler(part.labels, self.recipe.tested, 1, seed=0, groups=self.recipe.groups(part))
        for method in methods.values():
            if isinstance(method, FewShotMethod) and method.learner != SUPERVISED:
                spec = self.recipe.training(method, self.data)
                groups = self.recipe.groups(self.data.train)
                EpisodeStacks(
                    self.data.train.labels, spec, method.tasks, seed=0, world_size=self.machine.world, groups=groups
                )

    def context(self, name: str, method: FewShotRow, seed: int, shared: bool = False) -> FewShotContext:
        """The context of one row; that of an encoder is named after it."""
        return super().context(_name(name, method), method, seed, shared)

    def check_row(self, name: str, method: FewShotRow) -> None:
        """Refuse a value, backbone or learner, or an encoder that cannot be tested."""
        if isinstance(method, SavedEncoder):
            self._encoder(method)
            return
        spec = self.recipe.training(method, self.data)
        learner = build_learner(method, self.recipe.backbone, self.data, spec.ranges[0][1], 0)
        if method.learner == SUPERVISED:
            ImageBatches(self.data.train.labels, method.tasks // self.machine.world, seed=0)
        MetaStep(learner, self.data.train.images, compile=self.machine.compile)
        settings_of(method, 0, self.machine)

    def train(self, context: FewShotContext) -> TrainedLearner:
        """Meta-learn; the learner ends with the weights of the best validation accuracy."""
        if isinstance(context.method, SavedEncoder):
            return TrainedLearner()
        step, training = meta_training(context)
        if context.start is not None:
            state = load_tensors(context.start / LEARNER)
            if context.method.learner == SUPERVISED:
                step.learner.load_state_dict(state)
                return TrainedLearner(step.to(self.machine.device))
            body = {name.removeprefix("module."): value for name, value in state.items() if name.startswith("module.")}
            step.learner.get_submodule("module").load_state_dict(body)
        report = train(**vars(training), run=context.run)
        centre(step.learner, self.data)
        return TrainedLearner(step, report)

    def pretraining_run(self, method: FewShotRow) -> tuple[str, FewShotRow] | None:
        found = self.recipe.pretraining(method) if isinstance(method, FewShotMethod) else None
        return None if found is None else (SUPERVISED, found)

    def pretrain(self, context: FewShotContext) -> TrainedLearner:
        return self.train(context)

    def path(self, name: str, seed: int) -> Path:
        """The folder of one run; the supervised training is one for all settings of a set."""
        if name != SUPERVISED:
            return super().path(name, seed)
        return self.out / self.benchmark / f"{self._shared}-{self.recipe_name}" / f"{name}-s{seed}"

    @property
    def _shared(self) -> str:
        return f"{self.dataset.rpartition('-')[0] or self.dataset}-{SUPERVISED}"

    def whole_config(self, name: str, method: FewShotRow, seed: int) -> dict[str, Any]:
        config = super().whole_config(name, method, seed)
        if name == SUPERVISED:
            left_out = ("tested", "episodes", "within")
            config = {key: value for key, value in config.items() if key not in left_out} | {"dataset": self._shared}
            config["tested"] = {"ways": 5}
        return config

    def score(self, context: FewShotContext, trained: TrainedLearner) -> EpisodeResult:
        test, recipe = self.data.test, self.recipe
        spec, episodes, groups = recipe.tested, recipe.test_episodes, recipe.groups(test)
        if isinstance(context.method, SavedEncoder):
            model, head = self._encoder(context.method), context.method.head
            centre = features_centre(model, self.data.train.images) if head == "centred" else None
            drawn = EpisodeSampler(test.labels, spec, episodes, seed=FROZEN_SEED["test"], groups=groups)
            return evaluate_embeddings(kept_features(model, test.images), self.plans or drawn, head=head, centre=centre)
        assert trained.step is not None
        return score_episodes(trained.step.learner, test, spec, episodes, groups=groups, plans=self.plans)

    def outcome(self, context: FewShotContext, trained: TrainedLearner, scores: EpisodeResult) -> Outcome:
        metrics = {"test_accuracy": scores.mean, "test_ci95": scores.ci95, "test_sd": scores.sd}
        counts = {"counts": {**self.data.counts, "test_episodes": scores.n}}
        method, step, report = context.method, trained.step, trained.report
        if isinstance(method, SavedEncoder) or step is None:
            return Outcome(metrics, {}, {"transductive": False, **counts})
        if report is None:
            budget = {name: value for name, value in context.before.items() if name != "wall_s"}
            return Outcome(metrics, budget, {"transductive": False, **counts})
        spec = self.recipe.training(method, self.data)
        passes, rate = method.encoder_passes(spec), report.updates_per_second
        budget = {
            "encoder_passes": context.before["encoder_passes"] + report.steps * passes,
            "updates": context.before["updates"] + report.steps,
            "best_step": report.best.step if report.best.history else report.steps,
        }
        speed = {"updates_per_s": round(rate, 2), "images_per_s": round(rate * passes)}
        extra = {"transductive": is_transductive(step.learner), **speed, **counts}
        chosen = {"validation_accuracy": report.best.value} if report.best.history else {}
        return Outcome({**metrics, **chosen}, budget, extra)

    def save(self, context: FewShotContext, trained: TrainedLearner, scores: EpisodeResult) -> None:
        from safetensors.torch import save

        if trained.step is None:
            return
        state, file = trained.step.learner.state_dict(), context.folder.path / LEARNER
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        with one_line_errors(f"cannot write {LEARNER} in {file.parent}"):
            write_whole(file, save(tensors))

    def _encoder(self, method: SavedEncoder) -> SavedModel | SavedLearner:
        """An encoder that has learned from no class of the test, as far as it says, and encodes images one by one."""
        model: SavedModel | SavedLearner = load_encoder(method.name, self.machine.device)
        if isinstance(model, SavedLearner) and is_transductive(model.learner):
            raise InputError(
                f"{method.name}: its encoder works inside an episode only, by batch statistics; name a run of "
                "protonet, or of another benchmark"
            )
        seen = ImageSet(torch.empty(0, 1, 1, 1, dtype=torch.uint8), torch.empty(0).long(), model.classes)
        check_disjoint({"the encoder's training": seen, "test": self.data.test})
        return model

    def config(self, method: FewShotRow) -> dict[str, Any]:
        """Return how a row is tested, its data, and how it learns."""
        data = self.data
        config: dict[str, Any] = {
            "tested": asdict(self.recipe.tested),
            "episodes": {"validation": self.recipe.validation_episodes, "test": self.recipe.test_episodes},
            "data": {"counts": data.counts, "files": self.files},
        }
        if self.recipe.within:
            config["within"] = self.recipe.within
        if self.recipe.trainval:
            config["trainval"] = True
        if isinstance(method, FewShotMethod):
            config |= {"choices": method.stored(), "backbone": self.recipe.backbone, "model": self.model(method)}
        return config

    def model(self, method: FewShotRow) -> dict[str, Any]:
        return describe(self.data, self.recipe.backbone, "standard", None)


def _name(name: str, method: FewShotRow) -> str:
    """The method's name in the table: that of an encoder says which run it is from."""
    if not isinstance(method, SavedEncoder):
        return name
    run = Path(method.name)
    return f"{name}-{run.resolve().name if run.exists() else re.sub('[^A-Za-z0-9._]+', '-', method.name)}"
