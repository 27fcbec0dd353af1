"""The training loop: a stream of batches, a module of losses, and a run that survives being killed."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from metapretrain.draws import seeded
from metapretrain.errors import InputError
from metapretrain.training import checkpoint, engine, environment
from metapretrain.training.logs import ProgressLine, titled
from metapretrain.training.run_folder import RunFolder
from metapretrain.training.settings import TrainSettings, learning_rate

log = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 60.0


@dataclass
class KeepBest:
    """The weights that were best in validations, and whether it is time to stop; never weights with NaN or infinity.

    Args:
        metric: the value of a validation that counts, the higher the better.
        patience: validations without a better value after which training is done; None: any number.
        start: the weights before the first update may be kept too. `name`: of what is trained, in the warning.
        forgiving: training that diverged ends with a warning and the best weights before that, else with an error.
        step, value: of the best validation; `since`: validations after it; `history`: of each, its step and values.
        diverged: the last weights, or the last value, were no numbers. `done`: training should end.

    Example:
        >>> best = KeepBest("accuracy", patience=2)
        >>> for step, accuracy in enumerate([0.5, 0.7, 0.6, 0.65], start=1):
        ...     best.see(step, {"accuracy": accuracy}, {"w": torch.tensor(step)})
        >>> best.step, best.value, best.weights["w"].item(), best.done
        (2, 0.7, 2, True)
    """

    metric: str = "accuracy"
    patience: int | None = None
    start: bool = False
    forgiving: bool = False
    name: str = "training"
    step: int = 0
    value: float = -math.inf
    since: int = 0
    diverged: bool = False
    done: bool = False
    weights: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    def begin(self, weights: Mapping[str, Any]) -> None:
        """Keep these weights until a validation finds others."""
        self.weights = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in weights.items()
        }

    def see(
        self,
        step: int,
        values: Mapping[str, float],
        weights: Mapping[str, Any],
        finite: bool = True,
        sound: bool = True,
    ) -> None:
        """Take note of a validation of `weights`, the metric and others in `values`.

        `finite`: the weights hold neither NaN nor infinity; `sound`: nor do the scores behind a metric that is no NaN.
        """
        value = values[self.metric]
        self.history.append({"step": step, **values})
        self.diverged = not (finite and sound) or math.isnan(value)
        if step or self.start:
            self.since += 1
            if value > self.value and not self.diverged:
                self.begin(weights)
                self.step, self.value, self.since = step, value, 0
        self.done = not finite or (self.patience is not None and self.since >= self.patience)
        if self.diverged and self.forgiving:
            log.warning("%s diverged by step %d: that of step %d is kept; lower its lr", self.name, step, self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        names = ("step", "value", "since", "diverged", "done", "weights", "history")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


class Stream(Protocol):
    """A source of batches for `train`; :class:`metapretrain.episodes.TaskStream` is one."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield `{task: batch}`, one per update, from where the state says."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""


@dataclass(frozen=True)
class TrainReport:
    """What a call of :func:`train` did.

    `steps` updates in all, of which `resumed_from` were done by an earlier process; `seconds` of this process; `losses`
    the last logged mean loss of each task; `batches` drawn from each task; `updates_per_second` the median over log
    intervals without evaluation and checkpoints (0 if there was only one); `best` the validations, if kept.
    """

    steps: int
    resumed_from: int
    seconds: float
    losses: dict[str, float]
    batches: dict[str, int]
    updates_per_second: float
    best: KeepBest = field(default_factory=KeepBest)


def train(
    step: nn.Module,
    stream: Stream,
    settings: TrainSettings,
    *,
    run: RunFolder | None = None,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
    keep_best: KeepBest | str | None = None,
    title: str = "train",
) -> TrainReport:
    """Train the parameters of `step` on the batches of `stream`, in place.

    Args:
        step: a module; `step({task: batch})` returns `{task: scalar loss}`; their sum is minimised. Optional members:
            `model`, for `settings.ema`; `start_epoch(task)`, called when a new pass over a task's batches begins;
            `reduces_gradients = True`: it averages its gradients over the ranks itself; `parameter_groups()`: the
            optimizer's groups, each with its highest `lr`.
        stream: yields `{task: batch}`; see :class:`Stream`. With `may_end = True`, training ends with it.
        run: for logs and checkpoints; a run cut short goes on from the last (on the CPU to the same bits).
        evaluate: called with the number of updates done, every `settings.evaluate_every`; its values are logged.
        keep_best: name of a value of `evaluate`, the higher the better, or a :class:`KeepBest` for more choices: the
            step ends with the weights of the best validation, also when it is cut short.

    Over several processes, BatchNorm of `step` takes the rows of all in training mode, also afterwards
    (:func:`metapretrain.distributed.share_norms`), unless `settings.local_batchnorm`.
    Raises TrainingError: a NaN or infinite loss, out of memory, or a stream that ends before the last step; InputError:
    a device that is not there, a checkpoint that cannot be written.

    Example:
        >>> class Line(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = nn.Parameter(torch.zeros(1))
        ...     def forward(self, batches):
        ...         return {name: (self.w - x).square().mean() for name, x in batches.items()}
        >>> from metapretrain.episodes import TaskStream
        >>> stream = TaskStream({"fit": [torch.ones(4)]}, "longest", seed=0, steps=50)
        >>> line = Line()
        >>> report = train(line, stream, TrainSettings(steps=50, lr=0.1, device="cpu"))
        >>> report.steps, round(line.w.item(), 2)
        (50, 1.0)
    """
    every_task = getattr(stream, "policy", None) in ("longest", "shortest")
    one_task_a_step = len(getattr(stream, "loaders", ())) > 1 and not every_task  # some parameters have no gradient
    accelerator = environment.make_accelerator(settings.device, settings.precision, unused_parameters=one_task_a_step)
    device: torch.device = accelerator.device
    with seeded(settings.seed * 100_003 + accelerator.process_index, [device] if device.type == "cuda" else []):
        loop = _Loop(step, stream, settings, accelerator, run, evaluate, title, keep_best)
        try:
            with loop.bar:
                while batches := loop.next_batches():
                    loop.engine.run(*loop.engine.prepared(batches))
                    loop.after_update()
            return loop.report()
        except torch.OutOfMemoryError as error:
            raise engine.TrainingError(
                environment.out_of_memory(str(device), loop.step, *environment.memory_held(device))
            ) from error
        finally:
            loop.restore_best()
            accelerator.unwrap_model(loop.module, keep_fp32_wrapper=False)


class _StreamEnd(Exception):
    """A stream that may end has ended."""


class _Loop:
    def __init__(
        self,
        step: nn.Module,
        stream: Stream,
        settings: TrainSettings,
        accelerator: Any,
        run: RunFolder | None,
        evaluate: Callable[[int], Mapping[str, float]] | None,
        title: str,
        keep_best: KeepBest | str | None,
    ) -> None:
        from tqdm.auto import tqdm

        self.best = KeepBest(keep_best) if isinstance(keep_best, str) else keep_best
        if self.best is not None and (settings.ema is not None or evaluate is None or settings.evaluate_every is None):
            raise InputError("keep_best needs evaluate and settings.evaluate_every, and no ema")
        self.plain, self.stream, self.settings, self.accelerator = step, stream, settings, accelerator
        self.folder, self.evaluate = run, evaluate
        step.to(accelerator.device)
        self.average = engine.moving_average(step, settings.ema)
        if settings.compile:
            log.info("compiling %d module(s)", environment.compile_parts(step))
        optimizer = engine.build_optimizer(step, settings, accelerator.device)
        if (follow := getattr(stream, "follow", None)) is not None:
            follow(optimizer, settings.clip)
        self.module = engine.over_ranks(step, accelerator, settings)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        self.step = self.resumed_from = self.start = 0
        self.evaluated = -1
        self.losses: dict[str, float] = {}
        self.speeds: list[float] = []
        self.engine = engine.Engine(self.module, self.optimizer, accelerator, settings, self.average)
        if self.best is not None:
            self.best.begin(step.state_dict())
        if run is not None:
            self._resume(run)
        self.began = self.saved_at = self.logged_at = time.monotonic()
        self.logged_step, self.batches = self.step, iter(stream)
        step.train()
        if self.best is not None and self.best.start and not self.step:
            self._evaluate()
        hidden = None if accelerator.is_main_process else True  # None: shown on a terminal
        shown: dict[str, Any] = {"desc": titled(title), "unit": "step", "disable": hidden, "leave": False}
        self.bar = tqdm(total=settings.steps, initial=self.step, **shown)
        silent = self.bar.disable and accelerator.is_main_process
        self.progress = ProgressLine(title, settings.steps, self.step) if silent else None

    def next_batches(self) -> list[dict[str, Any]]:
        """The batches of the next update, whose learning rate is set; none where training ends."""
        if self.step >= self.settings.steps or (self.best is not None and self.best.done):
            return []
        self.engine.set_rate(self._rate)
        try:
            return [self._next(self.batches) for _ in range(self.settings.accumulate)]
        except _StreamEnd:
            if self.step and self.evaluated < self.step:
                self._evaluate()
            return []

    def after_update(self) -> None:
        """Average, log, validate and save, each where it is due."""
        self.engine.average_weights()
        self.step += 1
        self.bar.update()
        if self.progress is not None:
            self.progress.at(self.step)
        logged, last = self.step % self.settings.log_every == 0, self.step == self.settings.steps
        if logged or last:
            self._log(logged)
        self._maybe_evaluate()
        if self.folder is not None and self.step < self.settings.steps and self._checkpoint_due():
            self._save(self.folder)
        if logged:
            self.logged_at, self.logged_step = time.monotonic(), self.step

    def report(self) -> TrainReport:
        """What was done, once the weights are those to keep."""
        if not self._forgiving():
            engine.refuse_bad_weights(self.plain, self.step, self._last_good())
        if self.average is not None:
            engine.averaged(self.plain).load_state_dict(self.average.module.state_dict())
        counts = dict(getattr(self.stream, "counts", {}))
        speed = statistics.median(self.speeds[1:]) if len(self.speeds) > 1 else 0.0
        seconds, best = time.monotonic() - self.began, self.best or KeepBest()
        return TrainReport(self.step, self.resumed_from, seconds, self.losses, counts, speed, best)

    def restore_best(self) -> None:
        """Give the step the best weights, if any are kept."""
        if self.best is not None:
            self.plain.load_state_dict(self.best.weights)

    def _forgiving(self) -> bool:
        return self.best is not None and self.best.forgiving

    def _rate(self, peak: float) -> float:
        s = self.settings
        warmup = round(s.warmup * s.steps) if s.warmup_steps is None else s.warmup_steps
        return learning_rate(self.step, s.steps, peak=peak, schedule=s.schedule, warmup=warmup, end=s.lr_end)

    def _next(self, batches: Iterator[dict[str, Any]]) -> dict[str, Any]:
        before = getattr(self.stream, "epochs", {})
        try:
            batch = next(batches)
        except StopIteration:
            if getattr(self.stream, "may_end", False):
                raise _StreamEnd from None
            told = f"the stream ended after {self.step} of {self.settings.steps} steps"
            raise engine.TrainingError(f"{told}; give TaskStream steps= (updates x accumulation)") from None
        start_epoch: Callable[[str], None] | None = getattr(self.plain, "start_epoch", None)
        for name, epoch in getattr(self.stream, "epochs", {}).items():
            if epoch != before[name] and start_epoch is not None:
                start_epoch(name)
        return batch

    def _log(self, whole: bool) -> None:
        losses = self.engine.read_losses(whole)
        now = time.monotonic()
        self.speeds.append((self.step - self.logged_step) / max(now - self.logged_at, 1e-9))
        self._refuse_bad_loss()
        self.losses = losses
        self.bar.set_postfix({name: f"{value:.3f}" for name, value in losses.items()}, refresh=False)
        if self.folder is not None:
            values = {f"loss_{name}": value for name, value in losses.items()}
            self.folder.log(self.step, "train", {**values, "learning_rate": self._rate(self.settings.lr)})

    def _refuse_bad_loss(self) -> None:
        bad = int(self.engine.first_bad)
        if bad >= 0 and not self._forgiving():
            raise engine.TrainingError(
                f"the loss became NaN or infinite at step {self.start + bad + 1}; {self._last_good()}; "
                "lower the learning rate, clip gradients (clip=1.0) or use precision fp32"
            )
        for part in self.plain.modules():
            if callable(check := getattr(part, "check", None)):
                check()

    def _last_good(self) -> str:
        kept = sorted(self.folder.checkpoints.glob("step-*")) if self.folder is not None else []
        if not kept:
            return "no checkpoint was saved"
        return f"the last good checkpoint is {kept[-1].name} in {kept[-1].parent}"

    def _maybe_evaluate(self) -> None:
        every, s = self.settings.evaluate_every, self.step
        if self.evaluate is not None and every is not None and (s % every == 0 or s == self.settings.steps):
            self._evaluate()

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        values, self.evaluated = self.evaluate(self.step), self.step
        self.plain.train()
        if self.folder is not None:
            self.folder.log(self.step, "validation", values)
        if self.best is not None:
            finite = not engine.not_finite(self.plain.named_parameters())
            self.best.see(self.step, values, self.plain.state_dict(), finite)

    def _checkpoint_due(self) -> bool:
        if self.best is not None and self.best.diverged:  # another attempt begins before that
            return False
        if self.settings.checkpoint_every is not None:
            return self.step % self.settings.checkpoint_every == 0
        if self.step % self.settings.log_every:
            return False
        due = torch.tensor([time.monotonic() - self.saved_at >= CHECKPOINT_SECONDS], dtype=torch.int32)
        if self.accelerator.num_processes > 1:  # the ranks' clocks differ: the first one decides for all
            from accelerate.utils import broadcast

            due = broadcast(due.to(self.accelerator.device))
        return bool(due.item())

    def _save(self, folder: RunFolder) -> None:
        from accelerate.utils import gather_object

        if not self._forgiving():
            self._refuse_bad_loss()
            engine.refuse_bad_weights(self.plain, self.step, self._last_good())
        generators = gather_object([environment.random_state(self.accelerator.device)])
        if self.accelerator.is_main_process:
            state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
            state |= {"stream": self.stream.state_dict(), "random": generators, "engine": self.engine.state_dict()}
            state |= {"seconds": folder.wall_seconds, "settings": asdict(self.settings)}
            checkpoint.save(folder.checkpoints, self.step, state)
        self.saved_at = time.monotonic()

    def _parts(self) -> dict[str, Any]:
        return {"module": self.plain, "optimizer": self.optimizer, "average": self.average, "best": self.best}

    def _resume(self, folder: RunFolder) -> None:
        found = checkpoint.load_latest(folder.checkpoints)
        if found is None:
            folder.cut_back(-1)
            return
        state = found.state
        engine.check_settings(state.get("settings"), self.settings)
        engine.load_states(found, self._parts())
        self.stream.load_state_dict(state["stream"])
        ranks, now = state["random"], self.accelerator.num_processes
        if len(ranks) != now:
            told = f"the checkpoint is of {len(ranks)} process(es), this run has {now}"
            raise engine.TrainingError(f"{told}: resume with as many as before")
        environment.set_random_state(ranks[self.accelerator.process_index])
        self.step = self.resumed_from = self.start = found.step
        folder.cut_back(found.step)
        folder.seconds_before = state.get("seconds", 0.0)
        self.engine.load_state_dict(state["engine"])
        log.info("resumed from step %d", found.step)
