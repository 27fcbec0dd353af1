"""One optimizer update, run eagerly or replayed as a CUDA graph; and what an update may not give."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.distributed import mean_over_ranks, share_norms
from metapretrain.errors import InputError
from metapretrain.graphs import Recorder
from metapretrain.nests import named_leaves
from metapretrain.training.checkpoint import Checkpoint
from metapretrain.training.settings import TrainSettings

log = logging.getLogger(__name__)

# How a run is done may change from session to session; what it computes may not.
FREE = {"device", "compile", "cuda_graph", "log_every", "checkpoint_every", "evaluate_every"}


class TrainingError(InputError):
    """Training cannot go on; the line names the step and the last good checkpoint."""


def check_losses(losses: Any, batch: Any) -> dict[str, Tensor]:
    """Return what a step gave if it is one scalar tensor per task of the batch, else raise InputError; never waits.

    Example:
        >>> check_losses({"fit": torch.ones(3)}, {"fit": None})
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: a step returns {task: scalar loss} for the tasks of its batch (fit), \
got fit: (3,)
    """
    right = isinstance(losses, Mapping) and losses and losses.keys() <= batch.keys()
    if right and all(isinstance(loss, Tensor) and loss.ndim == 0 for loss in losses.values()):
        return dict(losses)
    got = type(losses).__name__
    if isinstance(losses, Mapping):
        forms = {name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in losses.items()}
        got = ", ".join(f"{name}: {form}" for name, form in forms.items()) or "none"
    tasks = ", ".join(map(str, batch))
    raise InputError(f"a step returns {{task: scalar loss}} for the tasks of its batch ({tasks}), got {got}")


def refuse_bad_weights(module: nn.Module, step: int, last_good: str) -> None:
    """Raise TrainingError if weights are NaN or infinite, one update before a loss shows it; waits for the device."""
    if bad := not_finite(module.named_parameters()):
        told = f"the weights {bad[0]} are NaN or infinite after step {step}; {last_good}"
        raise TrainingError(f"{told}; lower the learning rate, clip gradients (clip=1.0) or use precision fp32")


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that hold NaN or infinity; waits for the device once.

    Example:
        >>> not_finite([("a", torch.ones(2)), ("b", torch.tensor([0.0, torch.inf])), ("c", torch.arange(2))])
        ['b']
    """
    floating = [(name, value.detach()) for name, value in named if value.is_floating_point()]
    finite = torch.stack([value.isfinite().all() for _, value in floating]).tolist() if floating else []
    return [name for (name, _), good in zip(floating, finite, strict=True) if not good]


def check_settings(stored: Any, settings: TrainSettings) -> None:
    """Refuse to go on from a checkpoint, whose settings are `stored` (None: unknown), under others that matter.

    Example:
        >>> check_settings({"lr": 0.1}, TrainSettings(steps=1, lr=0.2))
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: the checkpoint was trained with other settings: lr was 0.1, is 0.2; \
give the same again or start in another folder
    """
    if not isinstance(stored, Mapping):
        return
    changed = [
        f"{name} was {stored[name]}, is {value}"
        for name, value in asdict(settings).items()
        if name not in FREE and name in stored and stored[name] != value
    ]
    if changed:
        told = f"the checkpoint was trained with other settings: {'; '.join(changed)}"
        raise InputError(f"{told}; give the same again or start in another folder")


def load_states(found: Checkpoint, parts: Mapping[str, Any]) -> None:
    """Give each part (a module, an optimizer or None) its state in the checkpoint; TrainingError if it does not fit."""
    try:
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(found.state[name])
    except (RuntimeError, ValueError, KeyError) as error:  # its text has a line for each tensor
        told = f"the checkpoint {found.path} is of another model: {' '.join(str(error).split())}"
        raise TrainingError(f"{told}; give the model of the run again or start in another folder") from None


WARMUP_UPDATES = 3  # eager updates before a graph is recorded: lazy buffers and autotuning have to settle
MAX_GRAPHS = 48  # three tasks of texts with a width each 16 tokens; more shapes than this run eagerly


def build_optimizer(module: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer over the parameters that take a gradient; vectors and scalars are not decayed.

    A module with a method `parameter_groups` says itself what is trained, with which `lr` and `weight_decay`.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise InputError(f"{type(module).__name__} has no parameter that takes a gradient: nothing to train")
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    own: Callable[[], list[dict[str, Any]]] | None = getattr(module, "parameter_groups", None)
    groups = [group for group in (groups if own is None else own()) if group["params"]]
    fused = device.type == "cuda"
    if settings.optimizer == "sgd":
        nesterov = settings.momentum > 0
        return torch.optim.SGD(groups, settings.lr, settings.momentum, nesterov=nesterov, fused=fused)
    return torch.optim.AdamW(groups, settings.lr, fused=fused, capturable=fused)


def moving_average(step: nn.Module, decay: float | None) -> Any:
    """Return the average of the weights of the step (see :func:`averaged`) with this decay, or None without one."""
    if decay is None:
        return None
    if not isinstance(getattr(step, "model", None), nn.Module):
        raise InputError("ema averages the weights of step.model, which this step has not; give ema=None")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    return AveragedModel(averaged(step), multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


def averaged(step: nn.Module) -> nn.Module:
    """What `ema` averages, sharing its tensors: `step.model` with its buffers, and the step's other weights (heads)."""
    model = step.get_submodule("model")
    own = {id(p) for p in model.parameters()}
    return nn.ModuleList([model, nn.ParameterList(p for p in step.parameters() if id(p) not in own)])


def reduces_gradients(step: nn.Module) -> bool:
    """Whether a step averages its gradients over the ranks itself."""
    return bool(getattr(step, "reduces_gradients", False))


def records(accelerator: Any, settings: TrainSettings) -> bool:
    """Whether CUDA graphs record updates: not in fp16, nor accumulating; ranks need NCCL and shared BatchNorm."""
    several = accelerator.num_processes > 1
    able = accelerator.device.type == "cuda" and settings.accumulate == 1 and settings.precision != "fp16"
    able &= not several or ("nccl" in torch.distributed.get_backend() and not settings.local_batchnorm)
    if settings.cuda_graph and not able:
        log.warning("cuda_graph needs a GPU per process, no fp16, no accumulation, no local_batchnorm: not recorded")
    return able and settings.cuda_graph is not False


def over_ranks(step: nn.Module, accelerator: Any, settings: TrainSettings) -> nn.Module:
    """Return what an :class:`Engine` runs: `step`, over several processes with the same weights and shared BatchNorm.

    It is wrapped in DistributedDataParallel unless the step or a recorded update averages the gradients.
    """
    own = reduces_gradients(step)
    if accelerator.num_processes > 1 and not own:
        if not settings.local_batchnorm:
            share_norms(step)
        for tensor in step.state_dict().values():
            torch.distributed.broadcast(tensor, 0)
    unwrapped = own or records(accelerator, settings)
    module: nn.Module = accelerator.prepare_model(step, evaluation_mode=unwrapped)
    return module


class Engine:
    """Runs updates of `module(batches) -> {task: loss}`, recorded as CUDA graphs, and sums losses on the device.

    Over several processes a recorded update averages the gradients: DistributedDataParallel's hooks are not recorded.
    """

    def __init__(
        self, module: nn.Module, optimizer: Any, accelerator: Any, settings: TrainSettings, average: Any = None
    ) -> None:
        self.module, self.optimizer, self.accelerator, self.settings = module, optimizer, accelerator, settings
        self.average = average  # torch.optim.swa_utils.AveragedModel or None
        self.device: torch.device = accelerator.device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.window: dict[str, tuple[float, int]] = {}  # sum and number of the losses that were read last
        self.done = torch.zeros((), dtype=torch.int64, device=self.device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)  # update with a bad loss, from 0
        self.recorder = Recorder(
            self._update, plain=WARMUP_UPDATES, aside=True, warmups=0, prepare=optimizer.zero_grad, most=MAX_GRAPHS
        )
        self.recorder.possible = records(accelerator, settings)
        plain = accelerator.unwrap_model(module)
        self.source = None if average is None else averaged(plain)
        self.averages = accelerator.num_processes > 1 and module is plain and not reduces_gradients(plain)
        self.run: Callable[..., Any] = self._update
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.set_rate(lambda peak: peak)

    def set_rate(self, rate_of: Callable[[float], float]) -> None:
        """Set the learning rate of the next update, given the highest one of each group of parameters."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            rate = rate_of(peak)
            if self.device.type != "cuda":
                group["lr"] = rate
            elif isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
                group["lr"].fill_(rate)
            else:
                group["lr"] = torch.tensor(rate, device=self.device)

    def update(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Run one update over `accumulate` batches of the stream, and average the weights after it."""
        self.run(*self.prepared(batches))
        self.average_weights()

    def prepared(self, batches: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Count the batches of an update and bring them to the device; `run` takes what is returned."""
        from accelerate.utils import send_to_device

        for name in (name for batch in batches for name in batch):
            self.counts[name] = self.counts.get(name, 0) + 1
            if name not in self.sums:
                self.sums[name] = torch.zeros((), device=self.device)
        moved: list[Any] = [send_to_device(dict(batch), self.device, non_blocking=True) for batch in batches]
        one = len(moved) == 1 and all(isinstance(leaf, Tensor) for _, leaf in named_leaves(moved[0]))
        self.run = self.recorder if one and self.recorder.possible else self._update
        return moved

    def average_weights(self) -> None:
        """Move the average of the weights; not in a graph, since AveragedModel copies its counter to the device."""
        if self.average is not None:
            self.average.update_parameters(self.source)

    def _update(self, *batches: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for position, batch in enumerate(batches):
            last = position == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                losses = check_losses(self.module(batch), batch)
                total = torch.stack(list(losses.values())).sum() / len(batches)
                self.accelerator.backward(total)
            with torch.no_grad():
                for name, loss in losses.items():
                    self.sums[name].add_(loss.detach())
                bad = (self.first_bad < 0) & ~torch.isfinite(total)
                self.first_bad.copy_(torch.where(bad, self.done, self.first_bad))
        if self.averages:
            found = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
            for (p, _), mean in zip(found, mean_over_ranks([grad for _, grad in found]), strict=True):
                p.grad = mean
        if self.settings.clip is not None:
            self.accelerator.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self.optimizer.step()
        self.done.add_(1)

    def read_losses(self, whole: bool = True) -> dict[str, float]:
        """Return each task's mean loss over all ranks since the last call (or the one before); waits for the device."""
        seen = {name: count for name, count in self.counts.items() if count}
        sums = mean_over_ranks([self.sums[name] for name in seen])
        before = {} if whole else self.window
        self.window = {name: (total.item(), count) for (name, count), total in zip(seen.items(), sums, strict=True)}
        for name, (total, count) in before.items():
            more = self.window.get(name, (0.0, 0))
            self.window[name] = total + more[0], count + more[1]
        for name in self.counts:
            self.sums[name].zero_()
            self.counts[name] = 0
        return {name: total / count for name, (total, count) in self.window.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the losses since the last log line, for a checkpoint."""
        return {"sums": dict(self.sums), "counts": dict(self.counts), "window": dict(self.window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self.counts, self.window = dict(state["counts"]), dict(state.get("window", {}))


def with_gradients(loss: Tensor, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """The loss, whose backward adds these gradients (None: nothing): for a step that went backward itself.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with_gradients(torch.tensor(5.0), [torch.full((2,), 3.0)], [w]).backward()
        >>> w.grad
        tensor([3., 3.])
    """
    known = [(p, grad) for p, grad in zip(parameters, gradients, strict=True) if grad is not None]
    found: Tensor = _WithGradients.apply(loss, [grad for _, grad in known], *(p for p, _ in known))
    return found


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(outer[0] * grad for grad in ctx.gradients)
