"""Specs accept counts and ranges, and refuse everything else in one line."""

from __future__ import annotations

import numpy as np
import pytest

from metapretrain.episodes import EpisodeSpec
from metapretrain.errors import InputError


def test_numpy_integers_are_counts() -> None:
    assert EpisodeSpec(np.int64(5), np.int32(1), 15).longest == 80


def test_ranges_count_their_largest() -> None:
    spec = EpisodeSpec((2, 4), (1, 5), (3, 6))
    assert (spec.per_class, spec.longest) == (11, 44)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "5", None, (3, 2), (0, 2), (1, 2, 3), (1.0, 2)])
@pytest.mark.parametrize("what", ["ways", "shots", "queries"])
def test_bad_counts_are_one_line_that_names_the_count(what: str, bad: object) -> None:
    if what == "ways" and bad is None:
        pytest.skip("ways=None means any labels")
    with pytest.raises(InputError, match=what) as error:
        EpisodeSpec(**({"ways": 5, "shots": 1, "queries": 1} | {what: bad}))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
