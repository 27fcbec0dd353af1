"""Prototypical networks and R2-D2 as learners, beside MAML and its variants: an encoder and a classifier per task."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.checks import LARGEST, number, out_of_range, whole
from metapretrain.errors import InputError, one_of
from metapretrain.maml.learner import Learner, check_whole, checked_module, joined, pair
from metapretrain.nests import evaluation_mode, map_tensors
from metapretrain.protonet.prototypes import DISTANCES, check_shapes, class_ids, proto_logits, prototypes


class EmbeddingLearner(Learner):
    """A learner whose encoder embeds all tasks in one pass; a subclass fits a classifier on the embeddings."""

    fitted: Tensor | None

    def __init__(self, model: nn.Module, ways: int | None) -> None:
        super().__init__()
        self.module = checked_module(model)
        self.ways = None if ways is None else whole("ways", ways, 1)
        self.fitted = None

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        """What classifies each task, (T, ...), from support embeddings z (T, S, D) and labels y (T, S)."""
        raise NotImplementedError

    def apply_fitted(self, z: Tensor, fitted: Tensor) -> Tensor:
        """Logits (T, Q, W) of query embeddings z (T, Q, D)."""
        raise NotImplementedError

    def losses(self, support: Any, query: Any) -> Tensor:
        """Mean cross-entropy of each task's queries, (T,). Arguments as for MAML; labels are int64."""
        _, y = pair(query)
        logits = self._task_logits(support, query)
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(y.shape).mean(1)

    def backward(self, support: Any, query: Any) -> Tensor:
        """Add the gradient of the mean loss to ``.grad``; return the losses (T,), detached."""
        losses = self.losses(support, query)
        losses.mean().backward()
        return losses.detach()

    @torch.no_grad()
    def logits(self, support: Any, query: Any) -> Tensor:
        """Logits of each task's queries, (T, Q, W), in evaluation mode and without a graph."""
        with evaluation_mode(self):
            return self._task_logits(support, query)

    def clone(self) -> Any:
        """A learner of the same encoder, fitted for itself."""
        return copy.copy(self)

    def over_features(self, ways: int) -> Any:
        """A clone for tasks of so many classes whose examples are embedded already."""
        made = self.clone()
        made._modules, made.ways, made.fitted = {**self._modules, "module": nn.Identity()}, ways, None
        return made

    def adapt(self, x: Any, y: Tensor) -> None:
        """Fit to one task's support examples x (N, ...) and labels y (N,), 0..W-1."""
        _check_labels(y, self.ways)
        z = _finite(self._embed(x))
        check_shapes(z, y)
        self.fitted = self.fit(z[None], y[None])[0]

    def forward(self, x: Any) -> Tensor:
        """Logits (Q, W) by what :meth:`adapt` has fitted."""
        if self.fitted is None:
            raise InputError(f"this {type(self).__name__} is not adapted yet: call adapt(x, y) with support examples")
        return self.apply_fitted(self._embed(x)[None], self.fitted[None])[0]

    def _embed(self, x: Any) -> Tensor:
        return torch.flatten(self.module(**x) if isinstance(x, dict) else self.module(x), 1)

    def _task_logits(self, support: Any, query: Any) -> Tensor:
        (sx, sy), (qx, qy) = pair(support), pair(query)
        _check_rows("support", sx, sy, self.ways)
        _check_rows("query", qx, qy, int(sy.max()) + 1 if self.ways is None and sy.is_cpu else self.ways, len(sy))
        tasks, shots = sy.shape
        z = self._embed(map_tensors(lambda x: x.flatten(0, 1), joined(sx, qx)))
        z = (z if torch.is_grad_enabled() else _finite(z)).view(tasks, shots + qy.shape[1], -1)
        return self.apply_fitted(z[:, shots:], self.fit(z[:, :shots], sy))


class ProtoNet(EmbeddingLearner):
    """Prototypical network (Snell et al., 2017): a query's logits are minus its distances to class means.

    All tasks of a batch go through the encoder in one pass: in training mode BatchNorm takes the statistics of all. In
    evaluation mode it takes the running ones, so that no prediction depends on other queries.

    Args:
        model: maps x (N, ...) to embeddings; what they have beyond (N, D) is flattened.
        distance: "sqeuclidean" (the paper's), "euclidean" or "cosine".
        temperature: above 0; the logits are divided by it; learn_temperature: that is where it starts.
        ways: classes W of every task, each with support examples. None: read from the labels, which waits for the GPU.

    Raises InputError: bad values; a class without support examples (if `ways` is None).

    Example:
        >>> x, y = torch.tensor([[[0.0], [4.0]]]), torch.tensor([[0, 1]])  # one task
        >>> ProtoNet(nn.Identity()).logits((x, y), (x, y)).tolist()
        [[[-0.0, -16.0], [-16.0, -0.0]]]
    """

    log_temperature: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        *,
        distance: str = "sqeuclidean",
        temperature: float = 1.0,
        learn_temperature: bool = False,
        ways: int | None = None,
    ) -> None:
        super().__init__(model, ways)
        self.temperature = number("temperature", temperature, above=0)
        self.distance = one_of("distance", distance, DISTANCES)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature))) if learn_temperature else None

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        """Mean embedding of each class of each task, (T, W, D)."""
        return _centres(z, y, self.ways)

    def apply_fitted(self, z: Tensor, fitted: Tensor) -> Tensor:
        """Logits (T, Q, W) of embeddings (T, Q, D) by centres (T, W, D)."""
        temperature = self.temperature if self.log_temperature is None else self.log_temperature.exp()
        return torch.vmap(lambda q, c: proto_logits(q, c, self.distance, temperature))(z, fitted)


def ridge(z: Tensor, y: Tensor, penalty: Tensor | float) -> Tensor:
    """Weights (..., D, W) that minimise ``|z w - y|^2 + penalty |w|^2``, of rows z (..., S, D) and targets (..., S, W).

    In closed form; by the identity of Woodbury the matrix that is solved is (S, S) where there are fewer rows than
    dimensions (Bertinetto et al., 2019, equation 5). Differentiable by all three; `penalty` is above 0.

    >>> ridge(torch.tensor([[2.0]]), torch.tensor([[1.0]]), 1.0).item()  # 2 * 1 / (2 * 2 + 1)
    0.4...
    """
    rows, size = z.shape[-2:]
    small = rows <= size
    gram = (z @ z.mT if small else z.mT @ z).double()  # in float32 equal rows of a large norm would be singular
    damped = gram + penalty * torch.eye(min(rows, size), dtype=gram.dtype, device=z.device)
    right = (y if small else z.mT @ y).double()
    solved: Tensor = torch.linalg.solve_ex(damped, right).result  # solve waits for the device, so is not recorded
    return (z.mT.double() @ solved if small else solved).to(z.dtype)


class R2D2(EmbeddingLearner):
    """Ridge regression of one-hot labels as the classifier of each task (R2-D2, Bertinetto et al., 2019).

    Its closed form is differentiated through. Logits are ``scale * (z w + b) + bias``, with `scale`, `bias` and the
    logarithm of the `penalty` learned; `b` is a weight of a constant feature. Rows and targets are divided by the root
    of the number of support rows, as the paper's code does. A loss per task and modes as of :class:`ProtoNet`.

    Args:
        model: maps x (N, ...) to embeddings; what they have beyond (N, D) is flattened.
        penalty, scale: where they start.
        ways: number of classes W of every task. None: read from the labels, which waits for the device.

    Example:
        >>> x, y = torch.tensor([[[0.0], [4.0]]]), torch.tensor([[0, 1]])  # one task
        >>> R2D2(nn.Identity()).logits((x, y), (x, y)).argmax(2).tolist()
        [[0, 1]]
    """

    def __init__(self, model: nn.Module, *, penalty: float = 1.0, scale: float = 10.0, ways: int | None = None) -> None:
        super().__init__(model, ways)
        for name, value in (("penalty", penalty), ("scale", scale)):
            number(name, value, above=0)
        self.log_penalty = nn.Parameter(torch.tensor(float(penalty)).log())
        self.scale, self.bias = nn.Parameter(torch.tensor(float(scale))), nn.Parameter(torch.zeros(()))

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        """Weights of each task, (T, D + 1, W)."""
        ways = _ways_of(y, self.ways)
        with torch.autocast(z.device.type, enabled=False):  # solving has no half precision
            z = _with_ones(z.to(self.scale.dtype))
            targets = F.one_hot(y, ways).to(z.dtype)
            return ridge(z / z.shape[1] ** 0.5, targets / z.shape[1] ** 0.5, self.log_penalty.exp())

    def apply_fitted(self, z: Tensor, fitted: Tensor) -> Tensor:
        """Logits (T, Q, W) of embeddings (T, Q, D) by weights (T, D + 1, W)."""
        with torch.autocast(z.device.type, enabled=False):
            return self.scale * (_with_ones(z.to(self.scale.dtype)) @ fitted) + self.bias


def logistic(z: Tensor, y: Tensor, ways: int, penalty: float = 1.0, steps: int = 200) -> Tensor:
    """Weights (..., W, D + 1) of multinomial logistic regression on rows z (..., S, D), labels y (..., S); bias last.

    The minimum of the summed cross entropy plus ``penalty / 2 |w|^2``, without the bias (scikit-learn's with
    ``C = 1 / penalty``), by at most `steps` of accelerated descent with the Hessian's upper bound (Boehning, 1992),
    whose momentum begins anew where it leads back (O'Donoghue and Candes, 2015). Not differentiable.

    >>> w = logistic(torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1]), 2)
    >>> bool(w[0, 0] > 0), bool(w[1, 0] < 0)
    (True, True)
    """
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        z = z.float() if z.dtype != torch.float64 else z
        reduced = z.shape[-2] < z.shape[-1]
        basis, corner = torch.linalg.qr(z.mT) if reduced else (None, None)  # w lies in the span of the rows
        x = F.pad(z if corner is None else corner.mT, (0, 1), value=1.0)
        shrunk = torch.full(x.shape[-1:], penalty, dtype=x.dtype, device=x.device)
        shrunk[-1] = 0
        bound = 0.5 * x.mT @ x + torch.diag(shrunk.clamp(min=1e-6))
        inverse, targets = torch.cholesky_inverse(torch.linalg.cholesky_ex(bound).L), F.one_hot(y, ways).to(x.dtype)
        by_row, by_weight = inverse @ x.mT, inverse * shrunk
        w = ahead = x.new_zeros(*x.shape[:-2], x.shape[-1], ways)
        age = x.new_zeros(*x.shape[:-2], 1, 1)
        for step in range(1, steps + 1):
            moved = ahead - by_row @ ((x @ ahead).softmax(-1) - targets) - by_weight @ ahead
            change = moved - w
            back = ((ahead - moved) * change).sum((-2, -1), keepdim=True) > 0
            age = torch.where(back, 0.0, age + 1)
            ahead, w = moved + (age - 1).clamp(min=0) / (age + 2) * change, moved
            if step % 8 == 0 and bool(change.abs().max() <= 1e-6 * w.abs().max()):  # each look waits for the device
                break
        if basis is not None:
            w = torch.cat([basis @ w[..., :-1, :], w[..., -1:, :]], -2)
        return w.mT


HEADS = ("nearest", "normalised", "centred", "logistic")


class Classifier(EmbeddingLearner):
    """An encoder that is trained to tell all training classes apart, and tells new ones apart by its features.

    `head`: class means of features as they are ("nearest": Snell et al., 2017), of length 1 ("normalised"), or less the
    mean that :meth:`find_centre` has set and of length 1 ("centred", SimpleShot: Wang et al., 2019), or logistic
    regression on features of length 1 ("logistic": Tian et al., 2020). `features` is the encoder's D.
    """

    centre: Tensor

    def __init__(
        self, model: nn.Module, features: int, classes: int, *, head: str = "centred", ways: int | None = None
    ) -> None:
        super().__init__(model, ways)
        self.head = one_of("head", head, HEADS)
        self.classifier = nn.Linear(features, classes)
        self.register_buffer("centre", torch.zeros(features))

    def backward(self, support: Any, query: Any = None) -> Tensor:
        """Add the gradient of the mean cross entropy of `support`, (T, N, ...), to ``.grad``; return it, detached."""
        x, y = pair(support)
        _check_rows("support", x, y, self.classifier.out_features)
        loss = F.cross_entropy(self.classifier(self._embed(x.flatten(0, 1))).float(), y.flatten())
        loss.backward()
        return loss.detach()

    def find_centre(self, z: Tensor) -> None:
        """Centre features by the mean of z (N, D), those of the training images."""
        self.centre.copy_(z.mean(0))

    def fit(self, z: Tensor, y: Tensor) -> Tensor:
        """Class means (T, W, D), or weights of logistic regression (T, W, D + 1)."""
        z = self._shown(z)
        if self.head == "logistic":
            return logistic(z, y, _ways_of(y, self.ways))
        return _centres(z, y, self.ways)

    def apply_fitted(self, z: Tensor, fitted: Tensor) -> Tensor:
        """Logits (T, Q, W) of embeddings (T, Q, D)."""
        z = self._shown(z)
        return _with_ones(z) @ fitted.mT if self.head == "logistic" else -torch.cdist(z, fitted).square()

    def _shown(self, z: Tensor) -> Tensor:
        return shown_to(self.head, z, self.centre)


def shown_to(head: str, z: Tensor, centre: Tensor | None) -> Tensor:
    """What a head of :class:`Classifier` sees of features (..., D): as they are, of length 1, or less `centre` (D,)."""
    z = z - centre if head == "centred" and centre is not None else z
    return z if head == "nearest" else F.normalize(z, dim=-1)


def _finite(z: Tensor) -> Tensor:
    if bad := int(out_of_range(z).sum()):
        told = f"{bad} of {len(z)} embeddings hold NaN or infinity or more than {LARGEST:g}"
        raise InputError(f"{told}; if training diverged, lower its rate")
    return z


def _with_ones(z: Tensor) -> Tensor:
    return torch.cat([z, torch.ones_like(z[..., :1])], -1)


def _centres(z: Tensor, y: Tensor, ways: int | None) -> Tensor:
    """Mean embedding of each class of each task, (T, W, D), of z (T, N, D) and y (T, N)."""
    tasks, ways = len(z), _ways_of(y, ways)
    ids, inside = class_ids(y, ways)
    ids = torch.where(inside, ids + ways * torch.arange(tasks, device=y.device)[:, None], -1)
    return prototypes(z.flatten(0, 1), ids.flatten(), tasks * ways)[0].view(tasks, ways, -1)


def _ways_of(y: Tensor, ways: int | None) -> int:
    """How many classes each task has, by its support labels (T, S) unless it is known, which waits for no device."""
    found = int(y.max()) + 1 if ways is None else ways
    if (ways is None or y.is_cpu) and not bool(F.one_hot(y, found).any(1).all()):
        raise InputError(f"a class of 0..{found - 1} has no support example in some task; number them 0..W-1")
    return found


def _check_rows(name: str, x: Any, y: Any, ways: int | None, tasks: int | None = None) -> None:
    first = next(iter(x.values())) if isinstance(x, dict) else x
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in (first, y)]
    tasks = tasks if tasks is not None else len(y) if isinstance(y, Tensor) and y.dim() else 1
    if not isinstance(y, Tensor) or y.dim() != 2 or shapes[0][:2] != shapes[1] or len(y) != tasks:
        raise InputError(f"{name} is x {shapes[0]} and y {shapes[1]}; give ({tasks}, N, ...) and ({tasks}, N)")
    _check_labels(y, ways)


def _check_labels(y: Tensor, ways: int | None) -> None:
    check_whole(y)
    if y.is_cpu and y.numel() and (int(y.min()) < 0 or (ways is not None and int(y.max()) >= ways)):
        allowed = "0..W-1" if ways is None else f"0..{ways - 1}, those of {ways} classes"
        raise InputError(f"labels are {int(y.min())} to {int(y.max())}; give whole numbers {allowed}")
