"""Scores over episodes with their interval: of any predict function, of frozen embeddings, of an image encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from metapretrain.checks import decisive, whole
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.intervals import mean_interval
from metapretrain.evaluation.representation import Encode, check_embeddings, embed
from metapretrain.models.pretrained import FINETUNE, TUNING, FineTuning, finetune
from metapretrain.nests import evaluation_mode
from metapretrain.protonet.learner import HEADS, Classifier, shown_to
from metapretrain.protonet.prototypes import DISTANCES
from metapretrain.training.logs import ProgressLine

if TYPE_CHECKING:
    from metapretrain.data.images import ImageSet
    from metapretrain.episodes import Episode, EpisodePlan, EpisodeSpec


Predict = Callable[["Episode"], Tensor]
Plan = TypeVar("Plan")
LABELS = ("support_y", "query_y")  # of a plan


@dataclass(frozen=True)
class EpisodeResult:
    """Accuracy, or another `metric`, over `n` episodes: `mean` with `ci95`, the half-width of Student's t interval.

    `sd` is over episodes, `values` the score of each; `ci95` and `sd` are NaN for a single episode.
    """

    mean: float
    ci95: float
    sd: float
    n: int
    values: list[float]
    metric: str = "accuracy"

    @classmethod
    def of(cls, values: Sequence[float], metric: str = "accuracy") -> EpisodeResult:
        """Summarise the scores of episodes.

        Example:
            >>> print(EpisodeResult.of([0.8, 0.6, 0.7]))
            70.00% +- 24.84% (3 episodes)
            >>> print(EpisodeResult.of([0.8, 0.6, 0.7], "mse"))
            mse 0.7 +- 0.2484 (3 episodes)
        """
        interval = mean_interval(values)
        return cls(interval.mean, interval.half_width, interval.sd, interval.n, list(values), metric)

    def __str__(self) -> str:
        share = self.metric == "accuracy"
        mean, width = (f"{value:.2%}" if share else f"{value:.4g}" for value in (self.mean, self.ci95))
        told = f"{'' if share else f'{self.metric} '}{mean}{f' +- {width}' * math.isfinite(self.ci95)}"
        return f"{told} ({self.n:,} episode{'s' if self.n != 1 else ''})"


ERRORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda error: (error**2).mean(),
    "rmse": lambda error: (error**2).mean().sqrt(),
    "mae": lambda error: error.abs().mean(),
}


def evaluate_episodes(
    predict: Any,
    dataset: Any,
    sampler: Iterable[EpisodePlan | Episode],
    *,
    device: torch.device | str | None = None,
    batch: int = 1,
    metric: str | Callable[[Tensor, Tensor], Any] = "accuracy",
) -> EpisodeResult:
    """Accuracy, or another metric, of `predict` over the sampler's episodes.

    Args:
        predict: maps an Episode to logits (queries, ways) or labels int (queries,), 0..W-1, without a look at
            `episode.query.y`; or a learner (MAML and its variants). Modules are in evaluation mode meanwhile.
        dataset: any map-style data set of (x, label); None where the sampler gives episodes.
        sampler: plans, for example an EpisodeSampler with a number of episodes; or episodes of yours.
        batch: how many episodes of one shape a learner adapts to at a time, by its `logits`.
        metric: `accuracy`; of regression `mse`, `rmse` or `mae`, of outputs of the targets' shape; or a function of
            what `predict` returns and of `episode.query.y` to a number.

    Raises InputError: the sampler is endless or empty, or `predict` returns NaN or another shape; or episodes of
    several shapes in a batch.

    Example:
        >>> from metapretrain import EpisodeSampler, EpisodeSpec, proto_logits, prototypes
        >>> y = torch.arange(60) % 6
        >>> def nearest(episode):
        ...     centres, _ = prototypes(episode.support.x, episode.support.y, num_classes=5)
        ...     return proto_logits(episode.query.x, centres)
        >>> sampler = EpisodeSampler(y, EpisodeSpec(ways=5, shots=1, queries=4), episodes=100, seed=0)
        >>> print(evaluate_episodes(nearest, torch.utils.data.TensorDataset(torch.eye(6)[y], y), sampler))
        100.00% +- 0.00% (100 episodes)
    """
    from metapretrain.episodes import Episode, EpisodeDataset, stack

    whole("batch", batch, 1)
    if batch > 1 and not hasattr(predict, "logits"):
        raise InputError(f"batch={batch} needs a learner with `logits`; a function takes one episode at a time")
    if not callable(metric):
        one_of("metric", metric, ("accuracy", *ERRORS))
    one: Predict = getattr(predict, "predict", predict)
    episodes = EpisodeDataset(() if dataset is None else dataset)
    values: list[float] = []
    with evaluation_mode(predict):
        for plans in _chunks(_finite(sampler), batch):
            group = [plan if isinstance(plan, Episode) else episodes[plan] for plan in plans]
            group = group if device is None else [episode.to(device) for episode in group]
            answers = [one(group[0])] if batch == 1 else predict.logits(*stack(group)).unbind()
            values += [_measured(answer, e.query.y, metric) for answer, e in zip(answers, group, strict=True)]
    return EpisodeResult.of(values, metric if isinstance(metric, str) else getattr(metric, "__name__", "metric"))


def _measured(answer: Tensor, y: Tensor, metric: str | Callable[[Tensor, Tensor], Any]) -> float:
    if metric == "accuracy":
        return _accuracy(answer, y)
    answer = answer.detach() if isinstance(answer, Tensor) else answer
    if callable(metric):
        return float(metric(answer, y))
    if not isinstance(answer, Tensor) or answer.shape != y.shape:
        got = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise InputError(f"predict must return the targets' shape {tuple(y.shape)} for metric {metric!r}; got {got}")
    return float(ERRORS[metric](answer.double() - y.to(answer.device).double()))


def _finite(sampler: Iterable[Plan]) -> Iterable[Plan]:
    if getattr(sampler, "episodes", 0) is None:
        raise InputError("this sampler is endless: an evaluation needs EpisodeSampler(..., episodes=600) or so")
    return sampler


def _accuracy(answer: Tensor, y: Tensor) -> float:
    if not isinstance(answer, Tensor):
        raise InputError(f"predict must return a torch tensor, of logits or labels; got {type(answer).__name__}")
    if y.ndim != 1 or bool((y < 0).any()):
        told = f"labels of queries are {y.dtype} {tuple(y.shape)}, the least {y.min()}"
        raise InputError(f"{told}; give class indices 0..W-1 (queries,), and leave out queries without one")
    answer = answer.detach()
    if answer.ndim == 2 and answer.shape[0] == len(y) and answer.shape[1]:
        answer = decisive(answer).argmax(dim=1)
    if answer.shape != y.shape or answer.is_floating_point():
        given = f"{answer.dtype} {tuple(answer.shape)}"
        raise InputError(f"predict must return logits ({len(y)}, ways) or integer labels ({len(y)},); got {given}")
    return float((answer.to(y.device) == y).double().mean())


def evaluate_embeddings(
    z: Tensor,
    sampler: Iterable[EpisodePlan],
    *,
    distance: str = "euclidean",
    batch: int = 128,
    head: str = "nearest",
    centre: Tensor | None = None,
) -> EpisodeResult:
    """Accuracy by nearest support prototype, or another head, over the sampler's episodes, from embeddings made once.

    Prototypical classification (Snell et al., 2017, equations 1 and 2) with the embedding `z` (N, D) of every row of
    the data set; `batch` episodes of any shapes in one go. A query whose class has no support counts as wrong. `head`
    is one of :class:`metapretrain.protonet.learner.Classifier`'s, `centre` (D,) what `centred` takes off.
    Raises InputError: NaN in `z`, a row outside 0..N-1, an endless or empty sampler, `distance` for another head.
    """
    one_of("distance", distance, DISTANCES)
    if one_of("head", head, HEADS) == "centred" and centre is None:
        raise InputError("head centred needs a centre: the mean of features of other classes")
    check_embeddings(z)
    whole("batch", batch, 1)
    if head != "nearest" and distance != "euclidean":
        raise InputError(f"head {head} has a measure of its own: leave distance={distance!r} out, or take nearest")
    z = shown_to(head, z.detach().float(), centre)
    values: list[float] = []
    with torch.inference_mode():
        for plans in _chunks(_finite(sampler), batch):
            values += _by_regression(z, plans) if head == "logistic" else _score(z, plans, distance).tolist()
    return EpisodeResult.of(values)


def evaluate_finetuning(
    model: Any, rows: Any, sampler: Iterable[EpisodePlan], how: FineTuning = TUNING
) -> EpisodeResult:
    """Accuracy over the sampler's episodes of an encoder that is fine-tuned anew on each support set.

    `rows` are images uint8 (N, C, H, W) or a list of texts; see :func:`metapretrain.models.pretrained.finetune`.
    """
    plans, values = list(_finite(sampler)), []
    bar = tqdm(plans, FINETUNE, unit="episode", disable=None, leave=False)
    line = ProgressLine(FINETUNE, len(plans), unit="episodes") if bar.disable else None
    for plan in bar:
        shown = rows[list(plan)] if isinstance(rows, Tensor) else [rows[row] for row in plan]
        classifier = finetune(model, shown[: len(plan.support_y)], plan.support_y, how)
        values.append(_accuracy(classifier.predict(shown[len(plan.support_y) :]), plan.query_y))
        if line is not None:
            line.at(len(values))
    return EpisodeResult.of(values)


def _chunks(sampler: Iterable[Plan], size: int) -> Iterator[list[Plan]]:
    iterator = iter(sampler)
    while plans := list(islice(iterator, size)):
        yield plans


def _padded(parts: Sequence[Sequence[int] | Tensor], fill: int) -> Tensor:
    rows = [torch.as_tensor(part, dtype=torch.int64) for part in parts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def _score(z: Tensor, plans: Sequence[EpisodePlan], distance: str) -> Tensor:
    """Accuracy of each of B episodes, padded to the largest, (B,)."""
    support_y = _padded([plan.support_y for plan in plans], -1)
    query_y = _padded([plan.query_y for plan in plans], -1)
    sizes = [len(plan.support_y) for plan in plans]
    support = _padded([plan[:size] for plan, size in zip(plans, sizes, strict=True)], 0)
    query = _padded([plan[size:] for plan, size in zip(plans, sizes, strict=True)], 0)
    if support.shape != support_y.shape or query.shape != query_y.shape:
        raise InputError("a plan must list its support rows, then its query rows, with one label each")
    for rows in (support, query):
        if int(rows.min()) < 0 or int(rows.max()) >= len(z):
            raise InputError(f"a plan names row {int(rows.max())}; there are embeddings of rows 0..{len(z) - 1}")
    ways = int(max(support_y.max(), query_y.max())) + 1
    support, support_y, query, query_y = (t.to(z.device) for t in (support, support_y, query, query_y))
    member = torch.nn.functional.one_hot(support_y + 1, ways + 1)[..., 1:].to(z.dtype)
    counts = member.sum(dim=1)
    centres = member.transpose(1, 2) @ z[support] / counts.clamp(min=1)[..., None]
    queries = z[query]
    if distance == "cosine":  # between unit vectors the Euclidean distance orders as the cosine does
        queries, centres = (torch.nn.functional.normalize(x, dim=2) for x in (queries, centres))
    gap = torch.cdist(queries, centres, compute_mode="donot_use_mm_for_euclid_dist")  # (B, Q, W)
    gap = gap.masked_fill((counts == 0)[:, None], torch.inf)
    right = (decisive(-gap).argmax(dim=2) == query_y) & (query_y >= 0)
    return right.sum(dim=1).double() / (query_y >= 0).sum(dim=1)


def _by_regression(z: Tensor, plans: Sequence[EpisodePlan]) -> list[float]:
    """Accuracy of each episode; those of one shape that follow each other are scored together."""
    found: list[float] = []
    for (ways, _, _), group in groupby(plans, lambda plan: (len(plan.classes), len(plan.support_y), len(plan))):
        same = list(group)
        rows = torch.tensor([list(plan) for plan in same])
        support_y, query_y = (torch.stack([getattr(plan, name) for plan in same]).to(z.device) for name in LABELS)
        parts = z[rows.to(z.device)].split([support_y.shape[1], query_y.shape[1]], 1)
        classifier = Classifier(torch.nn.Identity(), z.shape[1], 1, head="logistic", ways=ways).to(z.device)
        scores = classifier.logits((parts[0], support_y), (parts[1], query_y))
        found += (decisive(scores).argmax(2) == query_y).double().mean(1).tolist()
    return found


def few_shot_accuracy(
    encode: Encode,
    images: ImageSet,
    spec: EpisodeSpec,
    episodes: int = 600,
    seed: int = 0,
    *,
    distance: str = "euclidean",
    batch_size: int = 512,
    device: torch.device | str | None = None,
    groups: Any = None,
) -> EpisodeResult:
    """Accuracy by nearest support prototype over random episodes of `images`, for example 5-way 1-shot.

    `encode` maps uint8 images (B, C, H, W) to embeddings (B, D), for example `load(run).encode`, once for each; rows of
    label -1 are left out. `groups`: one per image (N,); an episode stays inside a group.
    Raises InputError: no labelled image, too few classes or images for `spec`, embeddings with NaN.

    Example:
        >>> from metapretrain.data.images import load_digits_images
        >>> from metapretrain.episodes import EpisodeSpec
        >>> digits, spec = load_digits_images("test"), EpisodeSpec(ways=5, shots=1, queries=5)
        >>> result = few_shot_accuracy(lambda images: images.flatten(1).float(), digits, spec, episodes=200)
        >>> 0.6 < result.mean < 0.9  # by raw pixels
        True
    """
    from metapretrain.episodes import EpisodeSampler

    whole("episodes", episodes, 1)
    labelled = (images.labels >= 0).nonzero().flatten()
    if len(labelled) == 0:
        raise InputError(f"{images.name} {images.split} has no labelled image; few-shot accuracy needs labels")
    kept = None if groups is None else [groups[row] for row in labelled.tolist()]
    sampler = EpisodeSampler(images.labels[labelled].cpu(), spec, episodes, seed=seed, groups=kept)
    z = embed(encode, images.images[labelled], batch_size, device)
    return evaluate_embeddings(z, sampler, distance=distance)
