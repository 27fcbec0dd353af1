"""The data of an episode: any map-style data set behind an ordinary DataLoader; and a labelled batch split in two."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from metapretrain.checks import number
from metapretrain.draws import stratified_queries
from metapretrain.episodes.sampler import EpisodePlan, EpisodeSampler, read_labels
from metapretrain.errors import InputError
from metapretrain.nests import map_tensors, named_leaves

T = TypeVar("T")


def split_support_query(
    labels: Any, query_fraction: float = 0.25, generator: torch.Generator | None = None, *, stratified: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the rows of a batch at random: labels (B,) -> support rows and query rows, int64, ascending, on the CPU.

    About `query_fraction` of the batch are queries; if `stratified`, of each class, with a row on each side if it has
    two. Source: query prototypical pretraining (vision poster, "Experiments").
    Raises InputError: the fraction is not in (0, 1), fewer than two rows, or, if `stratified`, no class with two.

    Example:
        >>> support, query = split_support_query(torch.zeros(8, dtype=torch.int64))
        >>> len(support), len(query)
        (6, 2)
    """
    y = torch.from_numpy(read_labels(labels).codes)
    number("query_fraction", query_fraction, above=0, below=1)
    if len(y) < 2:
        raise InputError(f"a batch needs at least 2 rows to have a support and a query part, not {len(y)}")
    order = torch.randperm(len(y), generator=generator, device=generator.device if generator else None).cpu()
    if stratified and int(torch.bincount(y).max()) < 2:
        told = f"every class of this batch of {len(y)} has one example, so no query can have a prototype"
        raise InputError(f"{told}; use larger batches or fewer classes")
    if stratified:
        is_query = stratified_queries(order.argsort(), y, query_fraction)
    else:
        queries = min(max(round(query_fraction * len(y)), 1), len(y) - 1)
        is_query = torch.zeros(len(y), dtype=torch.bool)
        is_query[order[:queries]] = True
    return (~is_query).nonzero().flatten(), is_query.nonzero().flatten()


class _Tensors:
    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same on another device."""
        moved: Self = map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), self)
        return moved

    def pin_memory(self) -> Self:
        """The same in page-locked memory; a DataLoader with pin_memory=True calls this."""
        pinned: Self = map_tensors(lambda tensor: tensor.pin_memory(), self)
        return pinned


@dataclass(frozen=True)
class Batch(_Tensors):
    """Examples `x`, a tensor or a nest of dicts and lists of tensors, and their labels `y`, int64 (B,).

    Example:
        >>> Batch(torch.zeros(2, 3), torch.tensor([0, 1])).to("cpu").x.shape
        torch.Size([2, 3])
    """

    x: Any
    y: torch.Tensor


@dataclass(frozen=True)
class Episode(_Tensors):
    """A few-shot task: learn from `support`, be scored on `query`; y = 0..W-1 stand for the label values `classes`.

    `index` is its number within its epoch.

    Example:
        >>> half = Batch(torch.zeros(1, 3), torch.tensor([0]))
        >>> Episode(half, half, classes=("cat",), index=0).to("cpu").support.y
        tensor([0])
    """

    support: Batch
    query: Batch
    classes: tuple[Any, ...]
    index: int
    group: Any = None


def stack(episodes: Sequence[Episode]) -> tuple[Batch, Batch]:
    """Episodes of one shape side by side: their support and their query parts, each tensor (T, rows, ...).

    What a learner's `losses`, `backward` and `logits` take: ``maml.backward(*stack(episodes))``.
    Raises InputError: there are none, they differ in shape, or hold texts in place of tensors.

    Example:
        >>> half = Batch(torch.zeros(2, 3), torch.tensor([0, 1]))
        >>> support, query = stack([Episode(half, half, ("cat", "dog"), 0)] * 4)
        >>> support.x.shape, query.y.shape
        (torch.Size([4, 2, 3]), torch.Size([4, 2]))
    """
    if not episodes:
        raise InputError("there are no episodes to stack; give a list of at least one")
    support, query = ([(e.support.x, e.support.y) for e in episodes], [(e.query.x, e.query.y) for e in episodes])
    if not all(isinstance(leaf, torch.Tensor) for _, leaf in named_leaves((support, query))):
        raise InputError("stack takes episodes of tensors; encode or tokenise texts first")
    try:
        return Batch(*default_collate(support)), Batch(*default_collate(query))
    except RuntimeError:
        told = "episodes differ in their numbers of examples or in the shape of x"
        raise InputError(f"{told}; stack equal ones") from None


def identity(value: T) -> T:
    """Return `value`: the `collate_fn` of an episode loader, whose data set already collates."""
    return value


class EpisodeDataset(Dataset[Episode]):
    """Turns plans into episodes of a map-style data set or a tensor (N, ...).

    Items are (x, label), (x,), x or dicts; labels are the plan's, those of the data set are left out.

    Example:
        >>> from metapretrain.episodes import EpisodeSpec
        >>> data = torch.utils.data.TensorDataset(torch.arange(4.0), torch.tensor([0, 0, 1, 1]))
        >>> sampler = EpisodeSampler([0, 0, 1, 1], EpisodeSpec(ways=2, shots=1, queries=1), 3, seed=0)
        >>> loader = DataLoader(EpisodeDataset(data), batch_sampler=sampler, collate_fn=identity)
        >>> [episode.support.y.tolist() for episode in loader]
        [[0, 1], [0, 1], [0, 1]]
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = _by_position(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, plan: EpisodePlan) -> Episode:
        return self.__getitems__(plan)

    def __getitems__(self, plan: EpisodePlan) -> Episode:
        if not isinstance(plan, EpisodePlan):
            raise InputError(
                f"EpisodeDataset is indexed with an EpisodePlan, not {type(plan).__name__}: give the"
                " DataLoader batch_sampler=EpisodeSampler(...), and no sampler or batch_size"
            )
        if max(plan) >= len(self):
            told = f"episode {plan.index} names row {max(plan)} of a data set of {len(self)} rows"
            raise InputError(f"{told}; the sampler's labels must be those of this data set")
        support, query = self._read(plan.support), self._read(plan.query)
        batches = Batch(support, plan.support_y), Batch(query, plan.query_y)
        return Episode(*batches, classes=plan.classes, index=plan.index, group=plan.group)

    def _read(self, rows: list[int]) -> Any:
        if isinstance(self.dataset, torch.Tensor):
            return self.dataset[torch.tensor(rows, device=self.dataset.device)]
        many = getattr(self.dataset, "__getitems__", None)
        items: Sequence[Any] = many(rows) if many is not None else [self.dataset[row] for row in rows]
        try:
            return default_collate([_without_label(item) for item in items])
        except (TypeError, RuntimeError) as error:
            told = f"the items of an episode cannot be put side by side ({' '.join(str(error).split())})"
            raise InputError(f"{told}: give numbers, texts, arrays or tensors of one shape, or dicts of them") from None


def _by_position(dataset: Any) -> Any:
    """The data set, whose [] must take the number of a row: a Series or a dict would look up its name."""
    if hasattr(dataset, "iloc") and dataset.ndim == 1:
        return dataset.tolist()
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not indexed or isinstance(dataset, IterableDataset | Mapping) or hasattr(dataset, "iloc"):
        told = f"episodes need a data set with len() and indexing by the number of a row, not {type(dataset).__name__}"
        raise InputError(f"{told}: give a list of its rows")
    return dataset


def check_rows(dataset: Any, sampler: EpisodeSampler) -> None:
    """Refuse a sampler whose labels are not as many as the data set's rows."""
    if (rows := len(dataset)) != sampler.rows:
        raise InputError(f"give a label per row: the sampler has {sampler.rows} labels, the data set {rows} rows")


def _without_label(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {key: value for key, value in item.items() if key not in ("label", "labels")}
    if isinstance(item, (tuple, list)):
        if len(item) > 2:
            told = f"an item of the data set must be (x, label), (x,), x or a dict, not {len(item)} values"
            raise InputError(f"{told}: return a dict, or ((x1, x2), label)")
        return item[0]
    return item


class EpisodeLoader(DataLoader[Episode]):
    """A DataLoader of episodes, with its other options, that can change epoch and start in the middle.

    Do not pass it to accelerate's `prepare`.
    Raises InputError: the sampler's labels are not as many as the data set's rows.

    Example:
        >>> from metapretrain.episodes import EpisodeSpec
        >>> sampler = EpisodeSampler([0, 0, 1, 1], EpisodeSpec(ways=2, shots=1, queries=1), 3, seed=0)
        >>> loader = EpisodeLoader(torch.arange(4.0), sampler)
        >>> len(loader), [episode.index for episode in loader.iter_from(1)]
        (3, [1, 2])
    """

    def __init__(self, dataset: Any, sampler: EpisodeSampler, **options: Any) -> None:
        rows = EpisodeDataset(dataset)
        check_rows(rows, sampler)
        self.episodes = sampler
        # A new iterator would otherwise draw from the global random state.
        options.setdefault("generator", torch.Generator())
        super().__init__(rows, batch_sampler=sampler, collate_fn=identity, **options)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.episodes.set_epoch(epoch)

    def iter_from(self, position: int) -> Iterator[Episode]:
        """This rank's episodes of the epoch but for the first `position`; none of those is read."""
        self.episodes.set_epoch(self.episodes.epoch, position * self.episodes.world_size)
        return iter(self)
