"""Heads over sentence embeddings against the paper's tables, and what sharing means."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metapretrain.errors import InputError
from metapretrain.models.text_encoders import COMBINES, ClassHead, CosineHead, PairHead, share_hidden


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_sizes_are_those_of_the_tables() -> None:
    assert count(ClassHead(384, 5)) == 1_925
    sizes = {combine: count(PairHead(384, combine=combine)) for combine in COMBINES}
    assert sizes == {"mult": 296_065, "add": 296_065, "concat": 296_065 + 384}
    assert count(CosineHead()) == 0


@pytest.mark.parametrize("combine", COMBINES)
def test_pair_head_is_the_table_step_by_step(combine: str) -> None:
    head = PairHead(6, 3, combine).eval()
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    first = a @ head.first.weight.T + head.first.bias
    second = b @ head.second.weight.T + head.second.bias
    z = {"mult": first * second, "add": first + second, "concat": torch.cat([first, second], 1)}[combine]
    torch.testing.assert_close(head(a, b), z @ head.output.weight.T + head.output.bias)


def test_each_sentence_has_its_own_dropout() -> None:
    head = PairHead(512, combine="add", dropout=0.5)
    nn.init.eye_(head.first.weight)
    nn.init.eye_(head.second.weight)
    for parameter in (head.first.bias, head.second.bias):
        nn.init.zeros_(parameter)
    seen: list[torch.Tensor] = []
    head.output.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    torch.manual_seed(0)
    head(torch.ones(1, 512), torch.ones(1, 512))
    assert seen[0].unique().tolist() == [0, 2, 4]  # one mask for both would give 0 and 4 only
    class_head = ClassHead(512, 2, dropout=1.0)
    assert torch.equal(class_head(torch.randn(2, 512)), class_head.output.bias.expand(2, 2))


def test_one_output_is_a_score_for_each_row() -> None:
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    assert ClassHead(6, 1)(a).shape == PairHead(6)(a, b).shape == CosineHead()(a, b).shape == (4,)
    assert ClassHead(6, 5)(a).shape == PairHead(6, 5)(a, b).shape == (4, 5)


def test_shared_layers_are_the_same_parameters_and_learn_from_both_tasks() -> None:
    torch.manual_seed(0)
    para, sts = PairHead(6), PairHead(6)
    share_hidden(para, sts)
    assert count(nn.ModuleList([para, sts])) == 2 * (6 * 6 + 6) + 2 * 7
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    para.eval()(a, b).sum().backward()
    assert para.first.weight.grad is not None
    alone = para.first.weight.grad.clone()
    assert sts.first.weight is para.first.weight and sts.second is para.second
    assert sts.output.weight.grad is None
    sts.eval()(a, b).sum().backward()
    assert not torch.equal(para.first.weight.grad, alone)
    with torch.no_grad():
        para.second.weight.zero_()
    assert not sts.second.weight.any()


def test_cosine_scores_fill_the_range_and_nothing_else() -> None:
    a = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    b = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0], [-1.0, 0.0]])
    torch.testing.assert_close(CosineHead()(a, b), torch.tensor([5, 5 / 2**0.5, 0, 0]))
    torch.testing.assert_close(CosineHead(1, 4)(a, b), torch.tensor([4, 1 + 3 / 2**0.5, 1, 1]))


def test_cosine_gradient_is_right_and_absent_below_zero() -> None:
    a = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    near = (a + 0.3 * torch.randn(5, 4)).detach().requires_grad_()
    assert torch.autograd.gradcheck(CosineHead(), (a, near))
    CosineHead()(a, (-near).detach()).sum().backward()
    assert a.grad is not None
    assert not a.grad[F.cosine_similarity(a, -near) < 0].any()


def test_bad_input_is_one_line() -> None:
    with pytest.raises(InputError, match="did you mean 'concat'"):
        PairHead(4, combine="concatenate")
    with pytest.raises(InputError, match="low 5 is not below high 5"):
        CosineHead(5, 5)
    with pytest.raises(InputError, match="4 and 6 features"):
        share_hidden(PairHead(4), PairHead(6))
