"""The error on Lake's runs."""

from __future__ import annotations

import torch
from score_lake import lake_errors

from metapretrain.data.images import ImageSet


class First:
    """Answers the class whose drawing has the same first pixel."""

    def adapt(self, images: torch.Tensor, labels: torch.Tensor) -> First:
        self.shown, self.labels = images[:, 0, 0, 0].long(), labels
        return self

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        return self.labels[(images[:, 0, 0, 0].long()[:, None] == self.shown).int().argmax(1)]


def test_errors_are_counted_in_each_run() -> None:
    images = torch.arange(40).repeat_interleave(2).to(torch.uint8).view(80, 1, 1, 1).repeat(1, 1, 4, 4)
    images[1::2][3] = 200  # one item of the first run is of no class, so that the first one is answered
    runs = ImageSet(images, torch.arange(40).repeat_interleave(2), [str(c) for c in range(40)])
    assert lake_errors(First(), runs) == [0.05, 0.0]
