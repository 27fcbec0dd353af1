"""MixUp and CutMix: labels must be the shares that the pixels show."""

from __future__ import annotations

import pytest
import torch

from metapretrain.data.mix import cutmix_mask, mix
from metapretrain.errors import InputError


def _batch(batch: int = 64, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Image i has the value i everywhere, and is of class i."""
    x = torch.arange(float(batch)).view(-1, 1, 1, 1).expand(batch, 3, size, size).contiguous()
    return x, torch.eye(batch)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_labels_are_the_shares_of_the_pixels(kind: str, alpha: float) -> None:
    x, y = _batch()
    torch.manual_seed(0)
    mixed, soft = mix(x, y, alpha, kind)
    values = torch.arange(64.0)
    torch.testing.assert_close(mixed.mean((1, 2, 3)), soft @ values, atol=1e-3, rtol=0)
    torch.testing.assert_close(soft.sum(1), torch.ones(64))
    assert int((soft > 0).sum(1).max()) == 2
    assert len(soft.diagonal().unique()) > 10, "each image has a share of its own"
    # Where an image is pure, it is itself or its partner; CutMix never blends a pixel.
    if kind == "cutmix":
        assert bool((mixed == mixed.round()).all())


def test_mixup_draws_beta_shares() -> None:
    x, y = torch.zeros(4000, 1, 1, 1), torch.eye(2).repeat(2000, 1)
    x[:, 0, 0, 0] = y[:, 1]
    torch.manual_seed(0)
    for alpha in (0.3, 1.0, 4.0):
        mixed, soft = mix(x, y, alpha)
        torch.testing.assert_close(mixed.flatten(), soft[:, 1])
        share = soft[:, 1][(soft[:, 1] > 0) & (soft[:, 1] < 1)]
        assert abs(float(share.mean()) - 0.5) < 0.04
        assert (
            abs(float(share.var()) / (0.25 / (2 * alpha + 1)) - 1) < 0.15
        )  # the variance of Beta(alpha, alpha)


def test_cutmix_mask_has_the_pasted_share_inside_and_is_cut_off_at_the_border() -> None:
    kept = torch.tensor([0.75, 0.75, 1.0, 0.0])
    centre = torch.tensor([[0.5, 0.5], [0.0, 0.5], [0.5, 0.5], [0.5, 0.5]])
    mask = cutmix_mask(kept, centre, (16, 16))
    assert mask.sum((1, 2, 3)).tolist() == [64, 32, 0, 256]
    assert bool(mask[0, 0, 4:12, 4:12].all())


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_compiles_as_one_graph_and_reads_no_number(kind: str) -> None:
    x, y = _batch(8)
    torch.manual_seed(0)
    expected = mix(x, y, 0.5, kind)
    torch.manual_seed(0)
    result = torch.compile(mix, fullgraph=True, backend="aot_eager")(x, y, 0.5, kind)
    torch.testing.assert_close(result, expected)
    assert mix(x.to("meta"), y.to("meta"), 0.5, kind)[0].shape == x.shape


def test_bad_arguments_are_one_line() -> None:
    x, y = _batch(4)
    with pytest.raises(InputError, match="did you mean 'cutmix'"):
        mix(x, y, 1.0, "cutmx")
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="alpha must be a positive number"):
            mix(x, y, alpha)
    with pytest.raises(InputError, match="float labels"):
        mix(x, torch.arange(4), 1.0)
    with pytest.raises(InputError, match="float images"):
        mix(x.to(torch.uint8), y, 1.0)
