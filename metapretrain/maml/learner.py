"""MAML and its variants as learners over any module, with learn2learn's `clone()` and `adapt()` kept."""

import logging
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from metapretrain.checks import whole
from metapretrain.errors import InputError, one_of
from metapretrain.graphs import FORGET, Recorder, add_gradients, own_gradients
from metapretrain.maml.adapt import adapt, check_module_not_compiled, check_usable, choose_names, state_of, work
from metapretrain.maml.inner import (
    Named,
    at_step,
    check_finite,
    check_moves,
    check_operators,
    current_step,
    differentiable_twice,
    first_rate,
    leaves_of,
    parse_rates,
    scalar,
)
from metapretrain.maml.meta import meta_backward, meta_loss, meta_outputs
from metapretrain.maml.normalisation import POLICIES, adaptable, copy_tree, first_rows, forward_pass, functional
from metapretrain.nests import Nest, evaluation_mode, map_tensors, named_leaves, rebuild, tensors


def checked_module(module: Any) -> nn.Module:
    """Return `module`, or raise InputError unless it is one of PyTorch's."""
    if not isinstance(module, nn.Module):
        raise InputError(f"model must be a torch module, not a {type(module).__name__}")
    return module


def last_module(module: nn.Module) -> str:
    """Name of the module that holds the last parameter; raises InputError if no part has parameters."""
    names = [name.rpartition(".")[0] for name, _ in checked_module(module).named_parameters()]
    if not names or not names[-1]:
        raise InputError(f"{type(module).__name__} has no named head; say which parameters with head=...")
    return names[-1]


Loss = Callable[[Tensor, Tensor], Tensor]


class Learner(nn.Module):
    """What MAML, its variants and learners over embeddings share."""

    def predict(self, episode: Any) -> Tensor:
        """Logits (Q, W) of one episode's queries, for `evaluate_episodes`."""
        parts = (map_tensors(lambda t: t[None], pair(part)) for part in (episode.support, episode.query))
        return self.logits(*parts)[0]

    def logits(self, support: Any, query: Any) -> Tensor:
        """Logits of each task's queries, (T, Q, W)."""
        raise NotImplementedError

    def meta_parameters(self) -> Named:
        """Everything that the outer loop learns, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


class MAML(Learner):
    """Model-agnostic meta-learning (Finn et al., 2017) of a module's initial parameters.

    Use it for whole batches of tasks, by the fastest engine (:meth:`losses`, :meth:`backward`, :meth:`logits`), or as
    learn2learn's MAML, one task at a time: :meth:`clone`, then :meth:`adapt` with a loss.

    Args:
        model: maps x (N, ...) to logits (N, W), or to an object with `.logits`; a dict x becomes keywords.
        lr: inner rate, in any form of :func:`metapretrain.maml.adapt`.
        first_order: ignore second derivatives (FOMAML).
        allow_unused: leave parameters that a loss does not use as they are; None: as `allow_nograd`.
        allow_nograd: leave parameters that do not require a gradient as they are, instead of an error.
        steps, test_steps: inner steps, and those at evaluation (None: the same).
        batchnorm: policy while adapting, see :func:`metapretrain.maml.functional`.
        engine, only, checkpoint, chunk, optimizer: as for :func:`metapretrain.maml.meta_loss`.
        learn_rates: learn a rate for each parameter tensor and inner step, which start at `lr` (MAML++, Antoniou et
            al., 2019, section 4); evaluation steps beyond `steps` take the last.
        loss: of logits and labels, a scalar; for regression `F.mse_loss`.

    Raises InputError: bad values, at once or when they are first used.

    Example:
        >>> maml = MAML(nn.Linear(4, 2), lr=0.1)
        >>> x, y = torch.randn(3, 6, 4), torch.tensor([[0, 1] * 3] * 3)  # three tasks
        >>> maml.backward((x, y), (x, y)).shape, maml.module.weight.grad.shape
        (torch.Size([3]), torch.Size([2, 4]))
        >>> learner = maml.clone()  # as in learn2learn
        >>> learner.adapt(F.cross_entropy(learner(x[0]), y[0]))
    """

    _clone = False

    def __init__(
        self,
        model: nn.Module,
        lr: Any,
        first_order: bool = False,
        allow_unused: bool | None = None,
        allow_nograd: bool = False,
        *,
        steps: int = 1,
        test_steps: int | None = None,
        batchnorm: str = "batch",
        engine: str = "auto",
        only: Any = None,
        checkpoint: bool = False,
        chunk: int | None = None,
        optimizer: Any = "sgd",
        loss: Loss = F.cross_entropy,
        learn_rates: bool = False,
    ) -> None:
        super().__init__()
        self.module = checked_module(model)
        self.lr = lr
        check_finite("lr", tensors(lr))
        self.first_order, self.allow_nograd = first_order, allow_nograd
        self.allow_unused = allow_nograd if allow_unused is None else allow_unused
        self.steps = whole("steps", steps, 0)
        self.test_steps = self.steps if test_steps is None else whole("test_steps", test_steps, 0)
        self.batchnorm = one_of("batchnorm", batchnorm, POLICIES)
        self.engine, self.only, self.checkpoint, self.chunk = engine, only, checkpoint, chunk
        if not callable(loss):
            raise InputError(f"loss is {loss!r}; give a function of logits and labels, such as F.cross_entropy")
        self.optimizer, self.loss = optimizer, loss
        self.learn_rates = learn_rates
        if learn_rates:
            start, adapting = first_rate(lr), self._adapting()
            self.rated = list(adapting)
            first = [p.new_full((whole("steps", steps, 1),), start) for p in adapting.values()]
            self.rates = nn.ParameterList(map(nn.Parameter, first))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's output; of a clone that adapts in second order, differentiable twice."""
        if not self._clone:
            return self.module(*inputs, **keywords)
        with differentiable_twice(1 if self.first_order else 2), forward_pass():
            return self.module(*inputs, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # Batches of tasks

    def losses(self, support: Any, query: Any, step_weights: Tensor | None = None) -> Tensor:
        """Query loss of each task after adapting to its support, (T,), with its meta-gradient.

        `support` and `query` are pairs (x, y), or objects with `.x` and `.y`, of tensors (T, N, ...); `step_weights`
        (steps,) as for :func:`metapretrain.maml.meta_loss`. Labels of cross entropy are int64, or probabilities. Raises
        InputError for other ones, for a task whose labels are all ignored (a GPU's are not read: a support adapts
        nothing, a query's loss is NaN), for one episode in place of tasks, and for what `meta_loss` refuses.
        """
        return self._by(meta_loss, support, query, step_weights)()

    def backward(self, support: Any, query: Any, step_weights: Tensor | None = None) -> Tensor:
        """Add the gradient of the mean query loss to ``.grad``, chunk by chunk; the losses (T,), detached.

        On a GPU, with engine "auto", the fifth call with the same shapes is recorded as a CUDA graph and replayed from
        then on, with the same result. After as many calls as compiling would have paid for (see
        :func:`seconds_saved`) the step is compiled once, where that is possible, and agrees up to rounding. Modules and
        parameters with hooks, and computed rates, are never recorded.
        """
        s, q = self._stacked(support, query)
        if step_weights is not None or not records_itself(self, tensors((s, q))):
            return self.eager_backward(s, q, step_weights)
        if self not in _recordings:
            faster = COMPILERS[0]() if COMPILERS and not self.checkpoint else None
            _recordings[self] = RecordedBackward(self, eagerly, plain=4, most=8, faster=faster)
        return _recordings[self].backward(s, q)

    def eager_backward(self, support: Any, query: Any, step_weights: Tensor | None = None) -> Tensor:
        """As :meth:`backward`, never recorded."""
        return self._by(meta_backward, support, query, step_weights)()

    def _by(self, function: Callable[..., Tensor], support: Any, query: Any, weights: Tensor | None) -> partial[Tensor]:
        (s, q), loss = self._stacked(support, query), self._task_loss()
        options = {**self._options(s), "query_loss": self._of_query(loss, s), "step_weights": weights}
        return partial(function, loss, self._values(), s, self._after(s, q), **options)

    def logits(self, support: Any, query: Any) -> Tensor:
        """Logits of each task's queries after adaptation, (T, Q, W), in evaluation mode and without a graph."""
        s, q = self._stacked(support, query, scored=False)
        options, values = self._at_evaluation(s)
        x, function = self._after(s, q)[0], self._of_query(self._outputs(), s)
        with evaluation_mode(self), torch.enable_grad():
            outputs = meta_outputs(self._task_loss(), values, s, x, function, **options)
        return outputs.detach()

    def adapted(self, support: Any) -> Callable[[Any], Tensor]:
        """Adapt to one task's support rows, and return what then maps x (Q, ...) to logits (Q, W)."""
        s = pair(support)
        if isinstance(s[1], Tensor) and not s[1].ndim:
            raise InputError("support labels are a single number; give a tensor (N,), a label for each row")
        check_classes("support", self.loss, s[1][None] if isinstance(s[1], Tensor) else s[1])
        options, values = self._at_evaluation(s)
        options = {name: value for name, value in options.items() if name not in ("tasks", "chunk")}
        with evaluation_mode(self), torch.enable_grad():
            fast = map_tensors(Tensor.detach, adapt(self._task_loss(), values, s, **options))
        apply = self._of_query(self._outputs(), s, 0)
        own = map_tensors(Tensor.clone, s[0]) if self.batchnorm == "support" else None  # its tensors may be filled anew

        @torch.no_grad()
        def outputs(x: Any) -> Tensor:
            with evaluation_mode(self), at_step(self.test_steps):
                return apply(fast, x if own is None else joined(own, x, 0))  # type: ignore[no-any-return]

        return outputs

    def _at_evaluation(self, support: tuple[Any, Tensor]) -> tuple[dict[str, Any], Named]:
        """The options of :func:`adapt` without a graph, and the values to start from."""
        options = {**self._options(support), "order": 1, "steps": self.test_steps, "checkpoint": False}
        options["lr"] = map_tensors(Tensor.detach, self._rates(self.test_steps))
        return options, {name: value.detach() for name, value in self._values().items()}

    def _stacked(self, support: Any, query: Any, scored: bool = True) -> tuple[tuple[Any, Tensor], tuple[Any, Tensor]]:
        parts = pair(support), pair(query)
        for name, (x, y) in zip(("support", "query"), parts, strict=True):
            check_tasks(name, x, y)
            if scored or name == "support":
                check_classes(name, self.loss, y)
        return parts

    def _rates(self, steps: int) -> Any:
        if not self.learn_rates:
            return self.lr
        if whole("steps", self.steps, 0) > (kept := len(self.rates[0])):
            raise InputError(f"steps is {self.steps}, but rates are learned for {kept}; make a learner of as many")
        named = dict(zip(self.rated, self.rates, strict=True))
        places = [min(step, self.steps - 1) for step in range(steps)]
        return [{name: rate[place] for name, rate in named.items()} for place in places]

    def _adapting(self, allow_nograd: bool = True) -> Named:
        """The parameters that adapt, by name; raises InputError if some, unless `allow_nograd`, or all are frozen."""
        named = dict(self.module.named_parameters())
        chosen = {name: named[name] for name in choose_names(self.only, tuple(named))}
        frozen = [name for name, p in chosen.items() if not p.requires_grad]
        if len(frozen) == len(chosen):
            raise InputError(f"nothing adapts: all of {', '.join(frozen)} are frozen; see requires_grad_() or only=")
        if frozen and not allow_nograd:
            raise InputError(f"{', '.join(frozen)}: requires_grad is False; pass allow_nograd=True to leave them")
        return {name: p for name, p in chosen.items() if p.requires_grad}

    def _options(self, support: tuple[Any, Tensor]) -> dict[str, Any]:
        if not isinstance(self.first_order, (bool, np.bool_)):
            raise InputError(f"first_order is {self.first_order!r}; give True or False")
        own = ("steps", "engine", "checkpoint", "chunk", "optimizer", "allow_unused")
        options = {"tasks": len(support[1]), "lr": self._rates(self.steps), "order": 1 if self.first_order else 2}
        return options | {name: getattr(self, name) for name in own} | {"only": list(self._adapting(self.allow_nograd))}

    def _values(self) -> Named:
        named: Named = dict(self.module.named_parameters())
        if lazy := [n for n, p in (*named.items(), *self.module.named_buffers()) if is_lazy(p)]:
            raise InputError(f"{', '.join(lazy)}: no shape yet; run a batch through the module first")
        return named

    def _outputs(self) -> Callable[..., Any]:
        """Logits of parameters and all inputs but the `first`, by the module and its attributes as they are now."""
        apply, _, buffers = functional(self.module, self.batchnorm)

        def outputs(params: Nest, x: Any, first: int = 0) -> Tensor:
            rows = len(tensors(x)[0]) if first else 0
            with first_rows(first, rows) if first else nullcontext():
                made = apply(params, buffers, **x) if isinstance(x, Mapping) else apply(params, buffers, x)
            found = logits_of(made)
            if first and len(found) != rows:
                raise InputError(f'{tuple(found.shape)} are no logits of {rows} rows, as batchnorm="support" needs')
            return found[first:] if first else found

        return outputs

    def _after(self, support: tuple[Any, Tensor], query: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
        """The query, whose inputs come after the support's where they are normalised by the latter's statistics."""
        return (joined(support[0], query[0]), query[1]) if self.batchnorm == "support" else query

    def _of_query(self, function: Any, support: tuple[Any, Tensor], dim: int = 1) -> Any:
        """A function of task and inputs for what :meth:`_after` returns."""
        return partial(function, first=tensors(support[0])[0].shape[dim]) if self.batchnorm == "support" else function

    def _task_loss(self) -> Callable[..., Tensor]:
        outputs, loss = self._outputs(), self.loss

        def task_loss(params: Nest, batch: tuple[Any, Tensor], **first: int) -> Tensor:
            found = outputs(params, batch[0], **first)
            check_fits(loss, found, batch[1])
            try:
                return scalar(loss(found, batch[1]), "loss")
            except (IndexError, RuntimeError) as error:  # of the loop, and of vmap
                if not is_cross_entropy(loss) or "out of bounds" not in str(error):
                    raise
                last = found.shape[min(1, found.ndim - 1)] - 1
                raise InputError(f"{error}: labels must be 0 to {last}; or give the module more outputs") from None

        return task_loss

    # One task at a time, as in learn2learn

    def clone(
        self, first_order: bool | None = None, allow_unused: bool | None = None, allow_nograd: bool | None = None
    ) -> Any:
        """A learner with parameters of its own, from which gradients flow back to this one's."""
        if self.batchnorm == "support":
            raise InputError('clone() and adapt() know no support; batchnorm="support" needs losses() or logits()')
        check_module_not_compiled(self.module)
        replace = partial(adaptable, policy=self.batchnorm)
        copied = copy_tree(self.module, lambda p: p.clone() if p.requires_grad else p, replace)
        given = {"first_order": first_order, "allow_unused": allow_unused, "allow_nograd": allow_nograd}
        made = object.__new__(type(self))
        made.__dict__ = {**self.__dict__, "_clone": True, "_modules": {**self._modules, "module": copied}}
        made.__dict__ |= {name: value for name, value in given.items() if value is not None}
        return made

    def adapt(
        self,
        loss: Tensor,
        first_order: bool | None = None,
        allow_unused: bool | None = None,
        allow_nograd: bool | None = None,
    ) -> None:
        """One step of gradient descent of this clone's parameters on `loss`; None: as the learner was made.

        Raises InputError for parameters that the loss does not use or that take no gradient, by name; a loss that is
        not a scalar; rates that are not above 0, or one for each step.
        """
        if isinstance(loss, Tensor) and loss.is_cuda:
            tell_of_batches()
        first_order = self.first_order if first_order is None else first_order
        allow_unused = self.allow_unused if allow_unused is None else allow_unused
        weights = self._adapting(self.allow_nograd if allow_nograd is None else allow_nograd)
        check_usable({})
        if not scalar(loss, "adapt: loss").requires_grad:
            raise InputError("adapt: the loss has no gradient; compute it from this clone's output")
        check_operators(loss, weights.values(), twice=not first_order)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=not first_order, allow_unused=True)
        check_moves(loss, gradients)
        found = dict(zip(weights, gradients, strict=True))
        unused = [name for name, g in found.items() if g is None]
        if unused and not allow_unused:
            told = f"adapt: the loss does not use {', '.join(unused)}; pass allow_unused=True to keep them"
            raise InputError(f"{told}, and call adapt() on the clone that computed the loss")
        rates = self._rates(self.steps)
        if isinstance(rates, (list, tuple)):
            raise InputError("clone() and adapt() do not count steps; give lr as one rate or by name")
        parsed = parse_rates(rates, {name: w.shape for name, w in weights.items()}, 1)
        moved: dict[int, Any] = {
            id(w): w - parsed.at(0, name) * found[name] for name, w in weights.items() if found[name] is not None
        }
        for part in self.module.modules():  # wherever they are used
            for name, old in part._parameters.items():
                part._parameters[name] = moved.get(id(old), old)


logger = logging.getLogger(__name__)


def records_itself(learner: MAML, data: list[Tensor]) -> bool:
    """Whether `backward` may be recorded: on one GPU, engine "auto", and nothing that a replay would miss."""
    if learner.engine != "auto" or not data or not data[0].is_cuda or learner._clone:
        return False
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several or torch.cuda.is_current_stream_capturing() or not torch.is_grad_enabled():
        return False
    learned = learned_by(learner)
    hooked: list[Any] = [
        *(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in learned),
        *(hooks for part in learner.modules() for name, hooks in vars(part).items() if name.endswith("_hooks")),
    ]
    return not any(hooked) and all(p.is_leaf for p in learned) and not any(x.requires_grad for x in data)


def learned_by(learner: Any) -> list[Tensor]:
    """Parameters and rates that ask for a gradient; rates are not registered unless they are parameters."""
    rates = tensors(getattr(learner, "lr", None))
    return list({id(p): p for p in (*learner.parameters(), *rates) if p.requires_grad}.values())


def eagerly(learner: Any, *batch: Any) -> Tensor:
    """A learner's `eager_backward`."""
    losses: Tensor = learner.eager_backward(*batch)
    return losses


Step = Callable[..., Tensor]  # of a learner, support and query: adds gradients, returns the losses
COMPILERS: list[Callable[[], Step]] = []  # filled by metapretrain.maml.compiled, which imports this module
COMPILING = 60.0  # seconds, without a cache (49 on an idle machine with an H200)
SAVED = 2.5e13  # operations as counted below for each second that compiling saves (docs/results/speed-h200-jax.json)


def seconds_saved(learner: Any, support: Any, query: Any) -> float:
    """What compiling saves on a GPU of one recorded meta-step, by its arithmetic: a rule and not a timing."""
    named, passes = learner._values(), 3 if learner.first_order else 9
    once = 3 * work(named, query) + passes * learner.steps * work(named, support)
    return float(2 * once * len(support[1]) / SAVED)


class RecordedBackward:
    """What adds a learner's gradients on a GPU, recorded once for each shape, state and place of its tensors.

    `eager` adds them. `plain` calls come before the recording; `most` recordings are kept. `faster` takes over from it
    once a state and shape came as often as compiling takes to pay.
    """

    def __init__(self, learner: Any, eager: Step, plain: int, most: int, faster: Step | None = None) -> None:
        self.learner, self.last = ref(learner), list[Any]()  # not owned: it is kept by the learner
        self.states: dict[Any, int] = {}
        self.numbers, self.left = count(), dict[Any, float]()
        self.recorder = self._recorder(eager, plain, most)
        self.faster = None if faster is None else self._recorder(faster, 0, most)

    def _recorder(self, step: Step, plain: int, most: int) -> Recorder:
        return Recorder(
            partial(self._gradients, step),
            plain=plain,
            warmups=3,  # the engine's probe, lazy buffers and autotuning have to settle
            changed=lambda: list(self._learner().buffers()),
            prepare=self._check_replay,
            most=most,
        )

    def backward(self, support: Any, query: Any) -> Tensor:
        """As :meth:`MAML.backward`."""
        learner = self._learner()
        self.last[:] = support, query
        learned = learned_by(learner)
        places = [tensor.data_ptr() for tensor in (*learner.parameters(), *learned, *learner.buffers())]
        flags: Any = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        state = *places, *flags, cast, state_of(learner, places=True)
        if len(self.states) > FORGET:
            self.states.clear()
        number = self.states.get(state)  # in place of the state itself: its hundreds of parts take longer than a replay
        if number is None:
            number = self.states[state] = next(self.numbers)
        recorder = self.recorder
        if self.faster is not None and self._pays(number, support, query):
            recorder = self.faster
        losses, gradients = recorder(support, query, number)
        self.last.clear()
        add_gradients(learned, gradients)
        return losses  # type: ignore[no-any-return]

    def _pays(self, number: int, support: Any, query: Any) -> bool:
        """Whether compiling would have paid for itself by now: a loop is taken to go on as long as it has already."""
        key = number, *(x.shape for x in tensors((support, query)))
        if key not in self.left:
            if len(self.left) > FORGET:
                self.left.clear()
            self.left[key] = COMPILING / seconds_saved(self._learner(), support, query)
        self.left[key] -= 1
        return self.left[key] < 0

    def _learner(self) -> Any:
        learner = self.learner()
        assert learner is not None
        return learner

    def _gradients(self, step: Step, support: Nest, query: Nest, _: Nest) -> tuple[Tensor, list[Tensor | None]]:
        learner = self._learner()
        with own_gradients(learned_by(learner)) as found:
            losses = step(learner, support, query)
        return losses, found

    def _check_replay(self) -> None:
        """Raise RuntimeError for gradients that a replay would not collect, or random numbers that it would repeat."""
        learner = self._learner()
        known, before = {id(p) for p in learned_by(learner)}, (random.getstate(), torch.get_rng_state())
        losses = learner.losses(*self.last)
        if any(id(leaf) not in known for leaf in leaves_of([losses])):
            raise RuntimeError("the loss asks for gradients of other tensors than the learner's")
        if random.getstate() != before[0] or not torch.equal(torch.get_rng_state(), before[1]):
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            raise RuntimeError("the loss draws random numbers on the CPU, which a replay would repeat")


_recordings: WeakKeyDictionary[MAML, RecordedBackward] = WeakKeyDictionary()


@cache
def tell_of_batches() -> None:
    """Say, once for a process, that whole batches are faster."""
    logger.warning(
        "clone() and adapt() start the kernels of one task at a time; MAML.backward(support, query) of a batch of "
        'tasks gives the same gradient many times faster (silence: logging.getLogger("metapretrain.maml"))'
    )


def pair(batch: Any) -> tuple[Any, Any]:
    """(x, y) of a pair or of an object with these attributes; empty ones are refused, whose mean loss is NaN."""
    if hasattr(batch, "x") and hasattr(batch, "y"):
        batch = batch.x, batch.y
    elif not isinstance(batch, (tuple, list)):
        raise InputError(f"support and query are (x, y) each, not a {type(batch).__name__}")
    elif len(batch) != 2 or hasattr(batch[0], "y"):
        told = f"support and query are (x, y) each, not a {type(batch).__name__} of {len(batch)}"
        raise InputError(f"{told}; several episodes become one batch of tasks by metapretrain.stack(episodes)")
    empty = [tuple(tensor.shape) for tensor in tensors(batch) if not tensor.numel()]
    if empty:
        raise InputError(f"support and query need rows and tasks, but one of their tensors is empty: {empty[0]}")
    return batch[0], batch[1]


def joined(support: Nest, query: Nest, dim: int = 1) -> Nest:
    """Support and query rows of each task, (T, S + Q, ...); inputs are told apart by their names.

    Raises InputError for inputs that have no rows, or that differ in more than their number.
    """
    given = [{name: x for name, x in named_leaves(part) if isinstance(x, Tensor)} for part in (support, query)]
    forms = [{name: (x.dtype, x.shape[:dim], x.shape[dim + 1 :]) for name, x in part.items()} for part in given]
    sizes = [{x.shape[dim : dim + 1] for x in part.values()} for part in given]
    if forms[0] != forms[1] or any(len(kinds) != 1 or () in kinds for kinds in sizes):
        told = [", ".join(f"{n} {x.dtype} {tuple(x.shape)}".strip() for n, x in part.items()) for part in given]
        raise InputError(
            "support and query are joined in one batch, so that every input needs a row per example and the same form "
            f"in both; got {told[0]} and {told[1]}"
        )
    return rebuild(support, (torch.cat([own, given[1][name]], dim) for name, own in given[0].items()))


def check_tasks(name: str, x: Any, y: Any) -> None:
    """Raise InputError for one episode where tasks are wanted: labels (N,), or numbers (N, 1) of numbers (N, D)."""
    scalars = isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()
    if isinstance(y, Tensor) and (y.ndim < 2 or (scalars and y.shape[1] == 1)):
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        told = f"{name} is x {given} and y {tuple(y.shape)}, which is one episode; give tasks of them"
        raise InputError(f"{told}, x (T, N, ...) and y (T, N, ...): of one episode x[None] and y[None]")


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is the cross entropy of torch, whose labels are known to be classes."""
    return loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def check_fits(loss: Loss, outputs: Tensor, y: Any) -> None:
    """Raise InputError for labels of a shape that a loss of torch refuses, or broadcasts and so pairs with others."""
    modules, shape = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss), tuple(outputs.shape)
    if isinstance(loss, modules) or loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        fits, told = y.shape == shape, "this loss needs one shape, as by y[..., None] or outputs of another size"
    elif is_cross_entropy(loss):
        fits = len(shape) > 1 and y.shape == (shape if y.is_floating_point() else shape[:1] + shape[2:])
        told = "give class indices (N,), of one-hot rows y.argmax(-1), or float probabilities (N, W)"
    else:
        return
    if not fits:
        raise InputError(f"outputs are {shape} and labels {y.dtype} {tuple(y.shape)} of each task; {told}")


def check_whole(y: Any) -> None:
    """Raise InputError for labels that are no int64 tensor."""
    given = y.dtype if isinstance(y, Tensor) else f"a {type(y).__name__}"
    if given != torch.int64:
        raise InputError(f"labels are {given}; give whole numbers 0..W-1 as an int64 tensor, for example y.long()")


def check_classes(name: str, loss: Loss, y: Any) -> None:
    """Raise InputError for labels (T, ...) of cross entropy that are neither whole numbers nor probabilities.

    And for a task all of whose labels the loss ignores, on a CPU: reading them on a GPU would wait for it.
    """
    if not is_cross_entropy(loss):
        return
    if not isinstance(y, Tensor) or not y.is_floating_point():
        check_whole(y)
        ignored = getattr(loss, "ignore_index", -100)
        if y.is_cpu and bool((y == ignored).flatten(1).all(1).any()):
            told = f"all {name} labels of a task are {ignored}, which the loss ignores"
            raise InputError(f"{told}; leave that task out, or give it a label")
    elif y.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # the calls before the recording were looked at
    elif y.ndim < 3 or y.shape[-1] == 1 or bool((y < 0).any()) or not bool(((y.sum(-1) - 1).abs() < 1e-2).all()):
        raise InputError(
            f"labels are {y.dtype} {tuple(y.shape)} and no probabilities, as cross entropy needs them: for regression "
            "give loss=F.mse_loss, for classes whole numbers (T, N), for example y.long()"
        )


def logits_of(output: Any) -> Tensor:
    """The tensor itself, or the `.logits` of what a transformers classifier returns."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise InputError(f"the module returned a {type(output).__name__}; give one that returns logits")
    return found


class FOMAML(MAML):
    """First-order MAML (Finn et al., 2017, section 5.2): inner gradients are taken as constants.

    >>> FOMAML(nn.Linear(2, 2), lr=0.1).first_order
    True
    """

    def __init__(self, model: nn.Module, lr: Any, **options: Any) -> None:
        super().__init__(model, lr, **{**options, "first_order": True})


class ANIL(MAML):
    """Almost no inner loop (Raghu et al., 2020): only the head adapts, the body is meta-learned.

    `head` names the head, or several; None: the module that holds the last parameter.

    >>> ANIL(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), lr=0.1).only
    '2'
    """

    def __init__(self, model: nn.Module, lr: Any, *, head: Any = None, **options: Any) -> None:
        super().__init__(model, lr, **{"only": last_module(model) if head is None else head, **options})


class Reptile(FOMAML):
    """Reptile (Nichol et al., 2018): weights move towards those that inner steps on all examples of a task end with.

    The outer gradient is the mean over tasks of the weights minus the adapted ones (their section 2), so that plain
    SGD of rate `r` interpolates by `r`. Support and query examples are joined for the inner steps in training; at
    evaluation the inner steps see the support examples. The losses are those of the adapted weights on the queries.
    `batches` parts of the joined examples, with as many of each label (or most probable one) where the numbers divide,
    are taken in turn, one per inner step.

    >>> w, x, y = nn.Linear(1, 1, bias=False), torch.ones(1, 1, 1), torch.zeros(1, 1, 1)  # one task: w to 0
    >>> _ = nn.init.ones_(w.weight), Reptile(w, lr=0.25, loss=F.mse_loss).backward((x, y), (x, y))
    >>> w.weight.grad.item()  # 1 - (1 - 0.25 * 2 * 1)
    0.5
    """

    def __init__(self, model: nn.Module, lr: Any, *, batches: int = 1, **options: Any) -> None:
        super().__init__(model, lr, **options)
        self.batches = whole("batches", batches, 1)
        if self.learn_rates:
            raise InputError("Reptile's gradient reaches no rates: leave learn_rates out")

    def losses(self, support: Any, query: Any, step_weights: Tensor | None = None) -> Tensor:
        """As for MAML, with Reptile's gradient; `step_weights` are refused."""
        if step_weights is not None:
            raise InputError("Reptile has no loss between its steps: leave step_weights out")
        support, query = self._stacked(support, query)
        values, loss = self._values(), self._task_loss()
        options = self._options(support) | {"lr": map_tensors(Tensor.detach, self.lr)}
        of_query, after = self._of_query(loss, support), self._after(support, query)
        both = joined(support[0], query[0]), joined(support[1], query[1])
        most = min(both[1].shape[1], max(1, self.steps))  # each part has an example and a step, else some are unused
        parts = whole("batches", self.batches, 1, most)
        label = both[1].argmax(2) if both[1].ndim == 3 else both[1]  # of probabilities
        if parts > 1 and label.ndim == 2:  # examples of a label side by side, so that each part has as many of it
            order = label.argsort(dim=1, stable=True)
            both = map_tensors(lambda t: t[torch.arange(len(t), device=t.device)[:, None], order], both)

        def part_loss(params: Nest, data: tuple[Any, Tensor]) -> Tensor:
            return loss(params, map_tensors(lambda t: t[current_step() % parts :: parts], data))

        def ends(params: Nest, data: tuple[Any, Tensor]) -> Tensor:
            return torch.cat([of_query(params, data)[None], *(p.flatten() for p in params.values())])

        constant = {name: p.detach() for name, p in values.items()}
        found = meta_outputs(part_loss, constant, both, after, ends, **options).detach()
        start = torch.cat([p.flatten() for p in values.values()])
        return found[:, 0] + ((start.detach() - found[:, 1:]) * (start - start.detach())).sum(1)  # its value is 0

    def eager_backward(self, support: Any, query: Any, step_weights: Tensor | None = None) -> Tensor:
        """Add the mean of Reptile's gradients to ``.grad``; return the losses (T,), detached."""
        losses = self.losses(support, query, step_weights)
        losses.mean().backward()
        return losses.detach()


class MetaSGD(MAML):
    """Meta-SGD (Li et al., 2017): every parameter has an inner rate of its own, which is learned.

    All rates start at `lr`, above 0, or at `lrs`, one tensor per parameter; raises InputError if either does not fit.

    >>> [tuple(rate.shape) for rate in MetaSGD(nn.Linear(4, 2), lr=0.1).lrs]
    [(2, 4), (2,)]
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, first_order: bool = False, lrs: Any = None, **options: Any
    ) -> None:
        super().__init__(model, lr, first_order, **options)
        parameters = list(model.parameters())
        if self.learn_rates:
            raise InputError("MetaSGD learns its rates already: leave learn_rates out")
        rates = [torch.full_like(p, first_rate(lr)) for p in parameters] if lrs is None else list(lrs)
        if [r.shape for r in rates] != [p.shape for p in parameters]:
            raise InputError(f"lrs must be one tensor of the same shape for each of {len(parameters)} parameters")
        check_finite("lrs", rates)
        self.lrs = nn.ParameterList([nn.Parameter(rate.detach().clone()) for rate in rates])

    def _rates(self, steps: int) -> Any:
        names = [name for name, _ in self.module.named_parameters()]
        if len(names) != len(self.lrs):
            made = f"MetaSGD was made for {len(self.lrs)} parameters"
            raise InputError(f"{made}, but the module has {len(names)} now; make it anew when the module has changed")
        return dict(zip(names, self.lrs, strict=True))
