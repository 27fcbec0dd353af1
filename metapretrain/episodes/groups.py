"""Meta tasks: the rows of a data set put into groups without their labels, or by them as a control."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import check_seed, whole
from metapretrain.draws import Ints, numpy_generator
from metapretrain.episodes.sampler import read_labels
from metapretrain.errors import InputError, one_of

METHODS = ("kmeans", "label", "lda", "random")
MOST_GROUPS = 2**24  # a group's size is counted at its number
MANY = 20_000  # rows above which K-means and LDA take mini-batches: seconds instead of minutes
logger = logging.getLogger(__name__)


def group_tasks(
    texts_or_features: Any,
    k: int,
    method: str = "kmeans",
    seed: int = 0,
    *,
    labels: Any = None,
    smallest: int = 1,
    small: str = "merge",
) -> Tensor:
    """A group for each row, (N,) int64 in 0..K-1; the `groups` of :class:`EpisodeSampler`.

    The four methods of Huang et al. (sections 4.2 and 6.2):

    - "kmeans": K-means on features (N, D), sentence embeddings of any encoder (mini-batches above 20,000 rows);
    - "lda": the likeliest of K topics of texts, or of counts (N, V); rows without a known word are spread;
    - "random": groups of equal size;
    - "label": rows of one label stand together; with K above the number of labels, labels are split at random.

    Args:
        texts_or_features: N texts, or a tensor or array (N, D).
        labels: one per row, for "label" alone.
        smallest: rows that a group must have; use at least shots + queries.
        small: "merge" puts the rows of smaller groups into the nearest group (by features, else the largest);
            "drop" gives them -1: leave these rows out. Groups are then numbered anew.

    Raises InputError: K above the number of rows or below that of labels, features that the method cannot use, or no
    group large enough.

    Example:
        >>> group_tasks(["a b", "c d", "e f", "g h"], 4, "random").sort().values
        tensor([0, 1, 2, 3])
    """
    one_of("method", method, METHODS)
    one_of("small", small, ["drop", "merge"])
    k, seed, smallest = whole("k", k, 1), check_seed(seed), whole("smallest", smallest, 1)
    features = None if _are_texts(texts_or_features) else _as_matrix(texts_or_features)
    rows = len(texts_or_features)
    if k > rows:
        raise InputError(f"k is {k}, but there are only {rows} rows to group; give a smaller k")
    rng = numpy_generator(seed)
    if method == "kmeans":
        if features is None:
            raise InputError("kmeans needs features (N, D), for example sentence embeddings, not texts; encode them")
        groups = _kmeans(features, k, seed)
    elif method == "lda":
        groups = _topics(texts_or_features if features is None else features, k, seed, rng)
    elif method == "random":
        groups = rng.permutation(rows) % k
    else:
        groups = _by_label(labels, rows, k, rng)
    sizes = np.bincount(groups, minlength=k)
    logger.info("%s: %d groups of %s rows", method, k, sizes.tolist())
    if (found := int((sizes > 0).sum())) < k:
        logger.warning("%s found %d groups of the %d asked for: the rows do not differ enough", method, found, k)
    return tidy_groups(groups, smallest=smallest, small=small, features=features)[0]


def tidy_groups(groups: Any, *, smallest: int, small: str = "merge", features: Any = None) -> tuple[Tensor, int]:
    """Groups (N,) of at least `smallest` rows, numbered anew, and how many rows were merged or dropped.

    Groups are whole numbers below 2**24, -1 of rows that are in none; the rest is as in :func:`group_tasks`.
    Raises InputError: no group has so many rows, or a value that is not allowed.

    Example:
        >>> tidy_groups([0, 0, 1, 2, 2], smallest=2, small="drop")
        (tensor([ 0,  0, -1,  1,  1]), 1)
    """
    one_of("small", small, ["drop", "merge"])
    old, smallest = _numbers(groups), whole("smallest", smallest, 1)
    sizes = np.bincount(old[old >= 0])
    kept = np.flatnonzero(sizes >= smallest)
    if not len(sizes):
        raise InputError("there are no rows in groups, so nothing to tidy")
    if not len(kept):
        raise InputError(f"no group has {smallest} rows: the largest has {sizes.max()}; lower k or smallest")
    moved = (old >= 0) & ~np.isin(old, kept)
    new = np.where(moved, -1, old)
    if small == "merge" and moved.any():
        new[moved] = _nearest(old, kept, moved, features) if features is not None else kept[sizes[kept].argmax()]
    count = int(moved.sum())
    if count:
        what = "merged into others" if small == "merge" else "dropped"
        few = int((sizes > 0).sum()) - len(kept)
        logger.warning("%d rows of %d groups with less than %d rows were %s", count, few, smallest, what)
    numbers = np.full(len(sizes) + 1, -1)
    numbers[kept] = np.arange(len(kept))
    return torch.from_numpy(numbers[new]), count


def group_agreement(groups: Any, labels: Any) -> float:
    """Normalised mutual information of groups and labels: 0 independent, 1 the same; rows of group -1 left out.

    Example:
        >>> group_agreement([0, 0, 1, 1], ["bad", "bad", "good", "good"])
        1.0
    """
    from sklearn.metrics import normalized_mutual_info_score

    codes, names = np.asarray(groups), read_labels(labels).codes
    if codes.shape != names.shape:
        raise InputError(f"groups and labels must be one a row each, not {codes.shape} and {names.shape}")
    if not (codes >= 0).any():
        raise InputError("no row is in a group, so none can agree with its label")
    return float(normalized_mutual_info_score(names[codes >= 0], codes[codes >= 0]))


def _numbers(groups: Any) -> Ints:
    try:
        codes = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    except ValueError:
        raise InputError("groups must be whole numbers (N,), not lists of unequal length") from None
    if codes.ndim != 1 or (codes.size and codes.dtype.kind not in "biu"):
        raise InputError(f"groups must be whole numbers (N,), not {codes.dtype} of shape {codes.shape}")
    if codes.size and not -1 <= int(codes.min()) <= int(codes.max()) < MOST_GROUPS:
        allowed = f"-1 for rows in none, else 0 to {MOST_GROUPS - 1}"
        raise InputError(f"groups run from {codes.min()} to {codes.max()}; give {allowed}")
    return codes.astype(np.int64)


def _are_texts(source: Any) -> bool:
    if isinstance(source, str):
        raise InputError("texts must be a list of strings, one a row, not one string")
    return isinstance(source, Sequence) and bool(source) and all(isinstance(text, str) for text in source)


def _as_matrix(source: Any) -> Any:
    if isinstance(source, Tensor) and source.is_complex():
        raise InputError("features are real numbers; of complex ones the imaginary part would be lost")
    try:
        matrix = source.detach().cpu().float().numpy() if isinstance(source, Tensor) else np.asarray(source, np.float32)
    except (TypeError, ValueError):
        matrix = np.zeros(0)
    if matrix.ndim != 2 or not matrix.shape[1] or not np.isfinite(matrix).all():
        raise InputError("give a list of texts, or finite features of shape (N, D)")
    return matrix


def _kmeans(features: Any, k: int, seed: int) -> Ints:
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    options = {"n_clusters": k, "n_init": 4, "random_state": seed % 2**32}
    model = KMeans(**options) if len(features) <= MANY else MiniBatchKMeans(**options, batch_size=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer clusters than K: group_tasks says so
        found: Ints = model.fit_predict(features).astype(np.int64)
    return found


def _topics(source: Any, k: int, seed: int, rng: np.random.Generator) -> Ints:
    from sklearn.decomposition import LatentDirichletAllocation
    from sklearn.feature_extraction.text import CountVectorizer

    counts = source
    if _are_texts(source):
        rare = 2 if len(source) >= 1000 else 1
        counter = CountVectorizer(stop_words="english", min_df=rare, max_df=0.5, max_features=10_000)
        try:
            counts = counter.fit_transform(source)
        except ValueError as error:
            raise InputError(f"lda finds no words in the texts: {error}") from None
    elif (source < 0).any():
        raise InputError("lda needs texts, or counts of at least 0; these features have negative values")
    online = counts.shape[0] > MANY
    options = {"learning_method": "online", "batch_size": 1024} if online else {"max_iter": 20}
    model = LatentDirichletAllocation(k, random_state=seed % 2**32, **options)
    found: Ints = model.fit_transform(counts).argmax(1).astype(np.int64)
    wordless = np.asarray(counts.sum(1)).reshape(-1) == 0
    found[wordless] = rng.integers(0, k, int(wordless.sum()))
    return found


def _by_label(labels: Any, rows: int, k: int, rng: np.random.Generator) -> Ints:
    if labels is None:
        raise InputError("method label needs labels, one a row")
    read = read_labels(labels)
    sizes = np.bincount(read.codes)
    if len(read.codes) != rows or k < len(sizes):
        raise InputError(f"{len(read.codes)} labels of {len(sizes)} kinds do not make {k} groups of {rows} rows")
    pieces = np.ones(len(sizes), dtype=np.int64)
    while pieces.sum() < k:
        pieces[(sizes / pieces).argmax()] += 1
    groups, first = np.empty(rows, dtype=np.int64), 0
    for code, count in enumerate(pieces.tolist()):
        own = rng.permutation(np.flatnonzero(read.codes == code))
        groups[own] = first + np.arange(len(own)) % count
        first += count
    return groups


def _nearest(groups: Ints, kept: Ints, moved: Any, features: Any) -> Ints:
    matrix = _as_matrix(features)
    if len(matrix) != len(groups):
        raise InputError(f"features must be one a row: got {len(matrix)} for {len(groups)} rows in groups")
    means = np.stack([matrix[groups == group].mean(0) for group in kept])
    found: Ints = kept[((matrix[moved][:, None] - means) ** 2).sum(-1).argmin(1)]
    return found
