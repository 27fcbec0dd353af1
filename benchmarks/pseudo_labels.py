"""Pseudo labels of plain sentences (section 5 of Huang et al.)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from metapretrain.data.texts import TextSet
from metapretrain.draws import numpy_generator
from metapretrain.errors import InputError

log = logging.getLogger("metapretrain.pseudo_labels")


def pseudo_labelled(
    plain: Sequence[str],
    z_plain: Tensor,
    labels: Tensor,
    z: Tensor,
    *,
    rows: int | None,
    confidence: float,
    seed: int = 0,
) -> tuple[TextSet, dict[str, float]]:
    """Plain sentences with the label that a classifier gives them, as many of each class (section 5 of Huang et al.).

    The classifier is logistic regression on sentence embeddings. Of each class its surest sentences are kept.

    Args:
        plain: M sentences; `z_plain`: their embeddings (M, D).
        labels: int64 (N,) of labelled rows; `z`: their embeddings (N, D).
        rows: kept at most; None: as many as the rarest class allows.
        confidence: least probability of the label that is given; InputError if a class has none so sure.
        seed: of the tenth of the labelled rows that is held out to measure recall.

    Returns:
        the sentences with labels, and recall of each class on the held-out rows as `recall_class_0`, ..., with the
        numbers of sentences, of sure ones, and of those kept.
    """
    from sklearn.linear_model import LogisticRegression

    y, features = labels.numpy(), z.float().cpu().numpy()
    order = numpy_generator(seed).permutation(len(y))
    held, fitted = order[: max(1, len(y) // 10)], order[max(1, len(y) // 10) :]
    mean, spread = features[fitted].mean(0), features[fitted].std(0) + 1e-6
    model = LogisticRegression(max_iter=1000).fit((features[fitted] - mean) / spread, y[fitted])
    judged, classes = model.predict((features[held] - mean) / spread), int(y.max()) + 1
    right = {label: judged[y[held] == label] == label for label in np.unique(y[held]).tolist()}
    about = {f"recall_class_{label}": float(hits.mean()) for label, hits in right.items()}
    share = model.predict_proba((z_plain.float().cpu().numpy() - mean) / spread)
    given, sure = model.classes_[share.argmax(1)], share.max(1)
    candidates = [np.flatnonzero((given == label) & (sure >= confidence)) for label in range(classes)]
    counts = [len(found) for found in candidates]
    each = min(counts) if rows is None else min(*counts, rows // classes)
    if not each:
        rare = int(np.argmin(counts))
        raise InputError(
            f"none of {len(plain)} plain sentences is given label {rare} with a probability of {confidence} or more; "
            "lower pseudo_confidence, or give more sentences"
        )
    kept = np.concatenate([found[np.argsort(-sure[found], kind="stable")[:each]] for found in candidates])
    log.info("pseudo labels: %d sentences, sure of %s by class, %d of each kept", len(plain), counts, each)
    about |= {"plain_sentences": len(plain), "sure_sentences": sum(counts), "kept_sentences": len(kept)}
    texts = TextSet([plain[row] for row in kept.tolist()], labels=torch.from_numpy(given[kept]).long(), split="pseudo")
    return texts, about
