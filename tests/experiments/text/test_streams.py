"""Batches of similar length: every row once a pass, aligned over tasks, one width an update, resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from metapretrain.data.tokens import Tokens
from metapretrain.errors import InputError
from metapretrain.experiments.text.streams import TextStream


def lengths(n: int, longest: int, seed: int) -> list[int]:
    return torch.randint(3, longest + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens_of(sizes: list[int], second: list[int] | None = None) -> Tokens:
    other = None if second is None else tokens_of(second)
    return Tokens.from_rows([[1] * size for size in sizes], second=other)


TOKENS = {
    "sst": tokens_of(lengths(90, 30, 0)),
    "para": tokens_of(lengths(200, 60, 1)),
    "sts": tokens_of(lengths(50, 40, 2), lengths(50, 40, 3)),
}


def stream(policy: str = "longest", steps: int = 60, **changes: Any) -> TextStream:
    return TextStream(TOKENS, 8, policy, **({"seed": 3, "steps": steps, "pool": 4} | changes))


@pytest.mark.parametrize("policy", ["longest", "shortest"])
def test_tasks_give_short_batches_together(policy: str) -> None:
    means: dict[str, list[float]] = {name: [] for name in TOKENS}
    for batch in stream(policy):
        for name, part in batch.items():
            means[name].append(float(TOKENS[name].widths[part["rows"]].float().mean()))
    table = torch.corrcoef(torch.tensor(list(means.values())))
    assert table.min() > 0.9, table  # although the loaders have 11, 25 and 6 batches


def test_one_width_holds_all_rows_and_is_rounded_up() -> None:
    seen = set()
    for batch in stream():
        widths = {part["width"].shape for part in batch.values()}
        assert len(widths) == 1
        width = widths.pop()[0]
        longest = max(int(TOKENS[name].widths[part["rows"]].max()) for name, part in batch.items())
        assert longest <= width < longest + 16 and width % 16 == 0
        seen.add(width)
    assert seen <= {16, 32, 48, 64}
    assert {part["sst"]["width"].shape[0] for part in stream(limit=60)} <= {16, 32, 48, 60}


def test_padding_is_counted_and_less_than_in_random_order() -> None:
    sorted_rows, random_rows = stream(), stream(pool=1)
    given = places = 0
    for batch in sorted_rows:
        for name, part in batch.items():
            for tokens in filter(None, (TOKENS[name], TOKENS[name].second)):
                given += int(tokens.lengths[part["rows"]].sum())
                places += 8 * part["width"].shape[0]
    list(random_rows)
    assert sorted_rows.padding_share == pytest.approx(1 - given / places)
    assert sorted_rows.padding_share < random_rows.padding_share - 0.1


@pytest.mark.parametrize("policy", ["longest", "shortest"])
@pytest.mark.parametrize("stop", [1, 7, 26])
def test_a_stream_goes_on_where_another_stopped(policy: str, stop: int) -> None:
    whole, first, second = stream(policy), stream(policy), stream(policy)
    batches = list(whole)
    taken = iter(first)
    for _ in range(stop):
        next(taken)
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert len(rest) == 60 - stop
    for ours, theirs in zip(rest, batches[stop:], strict=True):
        assert all(torch.equal(ours[name]["rows"], theirs[name]["rows"]) for name in TOKENS)
    with pytest.raises(InputError, match="state does not hold `given`, two counts"):
        second.load_state_dict({**first.state_dict(), "given": [1]})


def test_seeds_and_tasks_differ() -> None:
    same = {name: tokens_of([5] * 40) for name in "ab"}
    one = next(iter(TextStream(same, 8, "longest", seed=0, steps=1)))
    other = next(iter(TextStream(same, 8, "longest", seed=1, steps=1)))
    assert not torch.equal(one["a"]["rows"], one["b"]["rows"])
    assert not torch.equal(one["a"]["rows"], other["a"]["rows"])


def test_too_few_rows_name_the_task() -> None:
    with pytest.raises(InputError, match="sts: batch_size 51 is more than the 50 training rows"):
        TextStream(TOKENS, 51, "longest", seed=0, steps=1)
