"""Tasks of tokens: masked language modelling, and a class of each word."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.checks import decisive, number
from metapretrain.data.documents import Corpus, Documents
from metapretrain.errors import one_of
from metapretrain.experiments.schedule.tasks.base import IGNORE, CorpusTask, Frame, Tensors, joined
from metapretrain.models.text_encoders import TextEncoder

MASKED = ("token", "word", "span")
SPAN = 3  # words of a masked span at most


class MaskedHead(nn.Module):
    """BERT's head of masked tokens: linear, GELU, layer norm, the encoder's own word embeddings, a bias."""

    def __init__(self, features: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.norm = nn.LayerNorm(features)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """States (..., D) and word embeddings (V, D) to logits (..., V)."""
        return F.linear(self.norm(F.gelu(self.hidden(states))), embeddings, self.bias)


class MaskedLM(CorpusTask):
    """Predict masked tokens from those around them.

    Rows are runs of a document's tokens, as many as fit. Of the chosen tokens 80% become the mask, 10% a random
    token, 10% stay. The batch has `places` and `labels` (B, P): where the chosen tokens are and what they were;
    places left over have the label IGNORE.

    Args:
        whole: choose each ``"token"`` on its own, each ``"word"`` whole, or each ``"span"`` of 1 to 3 words: ERNIE's
            masking of phrases and entities, without knowing which words are one.
        rate: share of a row's tokens that are chosen, in (0, 1).

    Source: Devlin et al. (2019), section 3.1; Sun et al. (2020, ERNIE 2.0), knowledge masking.
    """

    name = "masked-lm"
    metric = "accuracy"

    def __init__(
        self, texts: Mapping[str, Documents], frame: Frame, *, whole: str = "token", rate: float = 0.15
    ) -> None:
        self.whole, self.rate = one_of("unit of masking", whole, MASKED), number("rate", rate, above=0, below=1)
        self.places = max(1, round(rate * frame.room()))
        super().__init__(texts, frame, lambda corpus: token_runs(corpus, frame.room()))

    def head(self, hidden: int) -> nn.Module:
        return MaskedHead(hidden, len(self.frame.tokenizer))

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        corpus, sequences = self.corpora[split], []
        places = np.zeros((len(rows), self.places), np.int64)
        labels = np.full((len(rows), self.places), IGNORE, np.int64)
        for place, row in enumerate(rows):
            begin, end = self.rows[split][row]
            ids, types, (start,) = self.frame.sequence(corpus.ids[begin:end])
            chosen = self._choose(corpus, begin, end, random) + start
            places[place, : len(chosen)] = chosen
            labels[place, : len(chosen)] = ids[chosen]
            draw = random.random(len(chosen))
            ids[chosen[draw < 0.8]] = self.frame.mask_id
            changed = chosen[draw >= 0.9]
            ids[changed] = random.choice(self.frame.pieces, len(changed))
            sequences.append((ids, types))
        batch = self.frame.pad(sequences)
        return batch | {"places": torch.from_numpy(places), "labels": torch.from_numpy(labels)}

    def logits(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        """Logits (B, P, V) of the chosen places."""
        index = batch["places"].unsqueeze(-1).expand(-1, -1, states.shape[-1])
        logits: Tensor = head(states.gather(1, index), encoder.model.get_input_embeddings().weight)
        return logits.float()

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        logits = self.logits(encoder, head, states, batch)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensors:
        logits, labels = self.logits(encoder, head, states, batch), batch["labels"]
        chosen = labels != IGNORE
        loss = F.cross_entropy(logits[chosen], labels[chosen], reduction="none")
        return {"right": decisive(logits[chosen]).argmax(-1) == labels[chosen], "loss": loss}

    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        """The share of chosen tokens that are found, and their mean cross entropy in nats."""
        right, loss = joined(outcomes, "right"), joined(outcomes, "loss")
        return {"accuracy": float(right.mean()), "loss": float(loss.mean())}

    def _choose(self, corpus: Corpus, begin: int, end: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Places of the tokens to predict, from the row's beginning."""
        count = min(self.places, max(1, round(self.rate * (end - begin))))
        if self.whole == "token":
            return random.permutation(end - begin)[:count].astype(np.int64)
        first, last = np.searchsorted(corpus.words, [begin, end])
        starts = np.unique(corpus.words[first:last]) - begin
        if self.whole == "span":
            steps = np.cumsum(random.integers(1, SPAN + 1, len(starts)))
            starts = starts[np.concatenate([[0], steps[steps < len(starts)]])]
        ends = np.append(starts[1:], end - begin)
        order = random.permutation(len(starts))
        fits = np.cumsum((ends - starts)[order]) <= count
        taken = order[fits] if fits.any() else order[:1]
        places = np.concatenate([np.arange(starts[unit], ends[unit]) for unit in taken])
        return places[:count]


def token_runs(corpus: Corpus, room: int) -> list[tuple[int, int]]:
    """Runs (begin, end) of at most `room` tokens that cover every document, cut between words where one fits."""
    runs = []
    for first, last in pairwise(corpus.documents):
        begin, end = (int(corpus.words[corpus.sentences[sentence]]) for sentence in (first, last))
        while begin < end:
            stop = int(corpus.words[np.searchsorted(corpus.words, min(begin + room, end), "right") - 1])
            stop = stop if stop > begin else min(begin + room, end)
            runs.append((begin, stop))
            begin = stop
    return runs
