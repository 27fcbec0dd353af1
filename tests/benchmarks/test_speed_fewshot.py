"""The rows about few-shot learning count what they do, and what they compare is the same work."""

from __future__ import annotations

from typing import Any

import pytest
import speed_fewshot
import torch


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CLASSES": 6, "SIZE": 16, "EPISODES": 12, "FEATURES": 8, "IMAGES": 30}.items():
        monkeypatch.setattr(speed_fewshot, name, value)


def test_an_update_takes_as_many_images_through_the_network_as_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, list[int]] = {}
    for contender in speed_fewshot.training("conv4"):
        seen = counts.setdefault(contender.name, [])

        def counted(module: Any, given: Any, _: Any, seen: list[int] = seen) -> None:
            if isinstance(module, torch.nn.Conv2d) and module.in_channels == 3:
                seen.append(given[0].numel() // given[0][..., 0, 0].shape[-1] // given[0].shape[-1] ** 2)

        handle = torch.nn.modules.module.register_module_forward_hook(counted)
        try:
            contender.make()(2)  # one more when it is made
        finally:
            handle.remove()
        assert sum(seen) == 3 * contender.each
    assert len(counts) == 2


def test_each_call_scores_all_episodes_by_each_head() -> None:
    contenders = speed_fewshot.scoring(1)
    assert [contender.each for contender in contenders] == [12] * len(contenders)
    for contender in contenders[:4]:
        contender.make()(1)


def test_the_peer_predicts_as_the_nearest_class_mean() -> None:
    pytest.importorskip("easyfsl")
    from metapretrain.episodes import EpisodeSampler, EpisodeSpec
    from metapretrain.evaluation.episodes import evaluate_embeddings

    labels = torch.arange(6).repeat_interleave(30)
    z = torch.randn(6, 8)[labels] + torch.randn(180, 8)
    plans = EpisodeSampler(labels, EpisodeSpec(5, 1, 15), 12, seed=0)
    assert speed_fewshot.easyfsl(z, plans)() == pytest.approx(evaluate_embeddings(z, plans).mean)
