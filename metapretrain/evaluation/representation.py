"""How good a feature space is without training a head: nearest prototype, kNN and silhouette."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import LARGEST, decisive, out_of_range, whole
from metapretrain.draws import numpy_generator
from metapretrain.errors import InputError
from metapretrain.nests import evaluation_mode
from metapretrain.protonet.prototypes import proto_logits, prototypes

Encode = Callable[[Tensor], Tensor]


def embed(encode: Encode, images: Tensor, batch_size: int = 512, device: torch.device | str | None = None) -> Tensor:
    """Embed all `images` (N, ...), without a graph, as float32 (N, D) on the device that `encode` runs on.

    `encode` maps a batch of rows to embeddings (B, D); its module is in evaluation mode meanwhile.
    Raises InputError: there are no images, or an embedding is not (B, D) or not finite.
    """
    if batch_size < 1 or len(images) == 0:
        raise InputError(f"embedding needs images and a batch size of 1 or more; got {len(images)} and {batch_size}")
    device = images.device if device is None else torch.device(device)
    z: Tensor | None = None
    with evaluation_mode(encode), torch.inference_mode():
        for start in range(0, len(images), batch_size):
            rows = images[start : start + batch_size].to(device)
            part = encode(rows)
            if not isinstance(part, Tensor) or part.ndim != 2 or len(part) != len(rows):
                got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                raise InputError(f"the encoder must return (batch, dimension) for a batch of {len(rows)}; got {got}")
            part = part.float()
            if z is None:
                z = part.new_empty(len(images), part.shape[1])
            z[start : start + len(part)] = part
    assert z is not None
    check_embeddings(z)
    return z.clone()  # an ordinary tensor again: an inference tensor could not enter later training


def check_embeddings(z: Tensor, y: Tensor | None = None, what: str = "embeddings") -> None:
    """Raise InputError unless `z` is (N, D) of finite numbers up to `LARGEST` and `y`, if given, is (N,) integers."""
    if z.ndim != 2 or len(z) == 0:
        raise InputError(f"{what} must be (N, D) with N >= 1; got shape {tuple(z.shape)}")
    bad = out_of_range(z).nonzero()
    if len(bad):
        told = f"{len(bad)} of {len(z)} rows hold NaN or infinity or more than {LARGEST:g}, first row {int(bad[0])}"
        raise InputError(f"{what}: {told}; if training diverged, lower the learning rate")
    if y is None:
        return
    if not isinstance(y, Tensor) or y.shape != z.shape[:1] or y.is_floating_point():
        given = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise InputError(f"{what} {tuple(z.shape)} need integer labels ({len(z)},) in a tensor; got {given}")
    if unlabelled := int((y < 0).sum()):
        told = f"{what}: {unlabelled} of {len(y)} labels are negative"
        raise InputError(f"{told}, and -1 marks rows without one; leave them out")


def nearest_prototype(z_train: Tensor, y_train: Tensor, z_test: Tensor) -> Tensor:
    """Predict the class whose mean training embedding is nearest in the Euclidean distance.

    Prototypical classification (Snell et al., 2017, equations 1 and 2): embeddings (N, D), their labels, any int (N,),
    and embeddings (M, D) to labels int64 (M,). Raises InputError: embeddings with NaN, or shapes that do not fit.
    """
    check_embeddings(z_train, y_train, "training embeddings")
    check_embeddings(z_test, what="test embeddings")
    if z_train.shape[1] != z_test.shape[1]:
        raise InputError(f"embeddings of two dimensions: {z_train.shape[1]} in training, {z_test.shape[1]} in test")
    labels, dense = torch.unique(y_train.to(z_train.device), return_inverse=True)
    centres, _ = prototypes(z_train, dense, len(labels))
    nearest: Tensor = labels[decisive(proto_logits(z_test, centres)).argmax(dim=1)]
    return nearest.long()


def _array(z: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return z.detach().float().cpu().numpy()


def knn_predict(z_train: Tensor, y_train: Tensor, z_test: Tensor, k: int = 20) -> Tensor:
    """Predict by the majority of the `k` training embeddings of highest cosine similarity (fewer if N < k).

    Embeddings (N, D), labels int (N,) and embeddings (M, D) to labels int64 (M,) on the CPU.
    """
    from sklearn.neighbors import KNeighborsClassifier

    check_embeddings(z_train, y_train, "training embeddings")
    check_embeddings(z_test, what="test embeddings")
    whole("k", k, 1)
    model = KNeighborsClassifier(min(k, len(z_train)), metric="cosine", algorithm="brute")
    predicted = model.fit(_array(z_train), y_train.cpu().numpy()).predict(_array(z_test))
    return torch.from_numpy(predicted).long()


def silhouette(z: Tensor, y: Tensor, max_points: int = 5000, seed: int = 0) -> float:
    """Mean silhouette of the labels in the embedding, Euclidean: 1 is tight and far apart, 0 overlapping.

    Beyond `max_points` rows a random part of that size, fixed by `seed`, is scored (the cost is quadratic).
    Raises InputError: there is only one class, or no class of two examples.
    """
    from sklearn.metrics import silhouette_score

    check_embeddings(z, y)
    kept = subsample(len(z), max_points, seed)
    z, y = z[kept.to(z.device)], y[kept.to(y.device)]
    classes = len(torch.unique(y))
    if not 2 <= classes < len(y):
        raise InputError(f"a silhouette needs 2 or more classes, and more rows than that; got {classes}, {len(y)} rows")
    return float(silhouette_score(_array(z), y.cpu().numpy()))


def subsample(n: int, most: int, seed: int = 0) -> Tensor:
    """Sorted rows of a random part of `n` rows, at most `most`, fixed by `seed`; int64."""
    if n <= most:
        return torch.arange(n)
    return torch.from_numpy(np.sort(numpy_generator(seed).choice(n, most, replace=False)))


def accuracy(predicted: Tensor, y: Tensor) -> float:
    """Share of predictions that are right, 0..1."""
    if predicted.shape != y.shape or len(y) == 0 or bool((y < 0).any()):
        told = f"{tuple(predicted.shape)} predictions for {tuple(y.shape)} labels"
        raise InputError(f"{told}: both must be (N,), N >= 1, and no label below 0, which marks rows without one")
    return int((predicted.cpu() == y.cpu()).sum()) / len(y)


def knn_leave_one_out(z: Tensor, y: Tensor, k: int = 20) -> float:
    """Accuracy (0..1) of classing each row by its `k` most similar other rows (cosine)."""
    from sklearn.neighbors import KNeighborsClassifier

    check_embeddings(z, y)
    if len(z) < 2 or k < 1:
        raise InputError(f"leave-one-out kNN needs 2 rows or more and k >= 1; got {len(z)} rows and k={k}")
    model = KNeighborsClassifier(min(k, len(z) - 1), metric="cosine", algorithm="brute")
    model.fit(_array(z), y.cpu().numpy())
    return accuracy(torch.from_numpy(model.predict(None)), y)  # None: each row by the others
