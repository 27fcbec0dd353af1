"""A bandit with a known answer: which source helps is known at every step, and so is the regret of a choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from metapretrain.scheduling import BlockScheduler, Exp3, FunctionProbe, Uniform, UtilityScheduler

RATE = 0.02
STEPS = 200


class Bandit:
    """A target at (1, 1); sources pull to points of the plane, one at a weight that the target does not use.

    `helpful` pulls to the target, `harmful` away from it, `neutral` moves the third weight only. `turning`
    pulls fast to (1, -0.2): from 0 that helps at first, and does harm once the first weight is there.
    """

    def __init__(self, turning: bool, noise: float = 0.05) -> None:
        self.w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        self.noise = noise
        self.goals = {"helpful": (1.0, 1.0, 0.0), "harmful": (-2.0, -2.0, 0.0), "neutral": (0.0, 0.0, 5.0)}
        if turning:
            self.goals["turning"] = (1.0, -0.2, 0.0)
        self.sources = {name: self._probe(name, goal) for name, goal in self.goals.items()}
        self.targets = {"goal": self._probe("goal", (1.0, 1.0, 0.0))}

    def _probe(self, name: str, goal: tuple[float, ...]) -> FunctionProbe:
        def sample(generator: torch.Generator) -> Tensor:
            return torch.tensor(goal) + self.noise * torch.randn(3, generator=generator, dtype=torch.float64)

        return FunctionProbe(sample, lambda batch: self._loss(name, batch))

    def _loss(self, name: str, goal: Tensor) -> Tensor:
        strength = 6.0 if name == "turning" else 1.0
        used = slice(2, 3) if name == "neutral" else slice(0, 2)
        return strength * (self.w - goal)[used].square().sum()

    def gains(self) -> dict[str, float]:
        """How far a step on each source, without noise, lowers the target's loss: the known answer."""
        found = {}
        for name, goal in self.goals.items():
            (gradient,) = torch.autograd.grad(self._loss(name, torch.tensor(goal)), self.w)
            after = self.w.detach() - RATE * gradient
            found[name] = float((self.w.detach()[:2] - 1).square().sum() - (after[:2] - 1).square().sum())
        return found

    def play(self, scheduler: BlockScheduler) -> tuple[list[str], float, float]:
        """Sources chosen, the regret (gains missed, summed), and the target's loss at the end."""
        chosen, regret = [], 0.0
        for step in range(STEPS):
            source = scheduler.choose().source
            gains = self.gains()
            regret += max(gains.values()) - gains[source]
            batch = self.sources[source].sample(torch.Generator().manual_seed(step))
            (gradient,) = torch.autograd.grad(self.sources[source].loss(batch), self.w)
            with torch.no_grad():
                self.w -= RATE * gradient
            scheduler.observe(source, gains[source])
            chosen.append(source)
        return chosen, regret, float((self.w[:2].detach() - 1).square().sum())


def utility(bandit: Bandit, **options: Any) -> UtilityScheduler:
    return UtilityScheduler(
        bandit.sources, bandit.targets, [bandit.w], **{"alpha": RATE, "updates": 4, "seed": 1, **options}
    )


@pytest.mark.parametrize("how", ["exact", "taylor"])
def test_utilities_find_the_helpful_source(how: str) -> None:
    bandit, other = Bandit(turning=False), Bandit(turning=False)
    chosen, regret, loss = bandit.play(utility(bandit, utility=how))
    _, uniform_regret, uniform_loss = other.play(Uniform(other.sources, updates=4, seed=1))
    print(f"{how}: regret {regret:.3f}, uniform {uniform_regret:.3f}; loss {loss:.4f}, uniform {uniform_loss:.4f}")
    assert set(chosen[:60]) == {"helpful"}
    assert regret < 0.05 * uniform_regret
    # Near the goal the target's gradient is noise, and Taylor alone may take a large harmful step for a large gain.
    assert chosen.count("harmful") <= (4 if how == "exact" else 20)
    assert loss < uniform_loss / 10


@pytest.mark.parametrize("how", ["exact", "taylor"])
def test_utilities_leave_a_source_that_turns_harmful(how: str) -> None:
    bandit, other = Bandit(turning=True), Bandit(turning=True)
    chosen, regret, loss = bandit.play(utility(bandit, utility=how, updates=1))
    _, uniform_regret, _ = other.play(Uniform(other.sources, seed=1))
    print(f"{how}: regret {regret:.3f}, uniform {uniform_regret:.3f}; loss {loss:.4f}")
    assert chosen[0] == "turning"
    assert "helpful" in chosen[:20]
    assert chosen[20:].count("turning") < 0.05 * STEPS
    assert regret < 0.02 * uniform_regret
    assert loss < (0.01 if how == "exact" else 0.1)


def test_exp3_learns_from_rewards_alone() -> None:
    bandit, other = Bandit(turning=False), Bandit(turning=False)
    chosen, _, loss = bandit.play(Exp3(bandit.sources, gamma=0.3, low=-0.3, high=0.1, seed=0))
    _, _, uniform_loss = other.play(Uniform(other.sources, seed=0))
    assert chosen[-50:].count("helpful") > 20
    assert loss < uniform_loss
