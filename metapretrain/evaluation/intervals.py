"""95% intervals: of a mean over seeds or episodes, a proportion, a correlation, and of paired differences."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metapretrain.errors import InputError


@dataclass(frozen=True)
class Interval:
    """A mean and its two-sided interval `[low, high]`; `sd` of the `n` values. What is not known is NaN."""

    mean: float
    half_width: float
    n: int
    sd: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return math.isfinite(self.half_width)

    def to_json(self) -> dict[str, float | int | None]:
        """Fields as JSON scalars, NaN as None."""
        fields = {"mean": self.mean, "half_width": self.half_width, "low": self.low, "high": self.high, "sd": self.sd}
        return {"n": self.n} | {name: value if math.isfinite(value) else None for name, value in fields.items()}


ABOVE = 0.975  # the share of a distribution below the upper limit of its two-sided 95% interval


def _finite(values: ArrayLike, what: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"{what} needs a list of one or more numbers; got shape {array.shape}")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise InputError(f"{what}: value {bad[0]} of {array.size} is {array[bad[0]]}; every value must be finite")
    return array


def mean_interval(values: Iterable[float]) -> Interval:
    """Mean of independent values (n,) with Student's t interval, `mean +- t(n - 1) sd / sqrt(n)`.

    Raises InputError: there is no value, or one is NaN or infinite.

    Example:
        >>> interval = mean_interval([0.70, 0.72, 0.74])
        >>> f"{interval.mean:.2f} +- {interval.half_width:.4f}"
        '0.72 +- 0.0497'
    """
    array = _finite(list(values), "an interval")
    n, mean = int(array.size), float(array.mean())
    if n == 1:
        return Interval(mean, math.nan, 1)
    from scipy.special import stdtrit  # not at import: scipy costs a tenth of a second

    sd = float(array.std(ddof=1))
    half = float(stdtrit(n - 1, ABOVE)) * sd / math.sqrt(n)
    return Interval(mean, half, n, sd, mean - half, mean + half)


def proportion_interval(correct: float, n: int) -> Interval:
    """Share of `n` independent trials that succeeded, with Wilson's score interval (Wilson 1927).

    It is not symmetric about `mean`. `correct`, 0..n, need not be whole (a mean over seeds times n).
    Raises InputError: `n` is below 1 or `correct` lies outside 0..n.

    Example:
        >>> interval = proportion_interval(80, 100)
        >>> f"{interval.mean:.2f} in [{interval.low:.4f}, {interval.high:.4f}]"
        '0.80 in [0.7112, 0.8666]'
    """
    if n < 1 or not 0 <= correct <= n:
        raise InputError(f"a proportion needs 0 <= correct <= n and n >= 1; got correct={correct}, n={n}")
    z = NormalDist().inv_cdf(ABOVE)
    p = correct / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    sd = math.sqrt(p * (1 - p) * n / (n - 1)) if n > 1 else math.nan
    return Interval(p, half, n, sd, max(0.0, centre - half), min(1.0, centre + half))


def correlation_interval(r: float, n: int) -> Interval:
    """Pearson's correlation of `n` pairs, with the interval `tanh(artanh r +- z / sqrt(n - 3))` (Fisher 1921).

    It takes the pairs for normal; of fewer than 4 there is no interval. `r` may be a mean over seeds.
    Raises InputError: `r` lies outside -1..1 or `n` is below 1.
    """
    if n < 1 or not -1 <= r <= 1:
        raise InputError(f"a correlation needs -1 <= r <= 1 and n >= 1; got r={r}, n={n}")
    if n < 4:
        return Interval(r, math.nan, n)
    if abs(r) == 1:
        return Interval(r, 0.0, n, math.nan, r, r)
    half = NormalDist().inv_cdf(ABOVE) / math.sqrt(n - 3)
    low, high = math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)
    return Interval(r, (high - low) / 2, n, math.nan, low, high)


def independent_mean_interval(parts: Sequence[Interval]) -> Interval:
    """Plain mean of figures measured on different examples, from the interval of each.

    The distances of the parts' limits from their means are added as squares (Zou and Donner 2008).
    """
    if not parts:
        raise InputError("a mean of intervals needs one or more")
    k, n = len(parts), sum(part.n for part in parts)
    mean = sum(part.mean for part in parts) / k
    if not all(part.known for part in parts):
        return Interval(mean, math.nan, n)
    low = mean - math.sqrt(sum((part.mean - part.low) ** 2 for part in parts)) / k
    high = mean + math.sqrt(sum((part.high - part.mean) ** 2 for part in parts)) / k
    return Interval(mean, (high - low) / 2, n, math.nan, low, high)


def paired_interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Mean of `a - b`, value by value on the same seeds, with Student's t interval."""
    if len(a) != len(b):
        raise InputError(f"paired values must be of the same seeds: got {len(a)} and {len(b)} values")
    return mean_interval(_finite(a, "paired values") - _finite(b, "paired values"))


def paired_images_interval(correct_a: ArrayLike, correct_b: ArrayLike) -> Interval:
    """Difference of two accuracies on the same images, with Student's t interval over the images' differences.

    Right or wrong is 0/1 or bool, (N,) or (seeds, N), of which the mean is taken; the seeds may differ in number.
    """
    means = []
    for correct in (correct_a, correct_b):
        array = np.asarray(correct, dtype=np.float64)
        if array.ndim not in (1, 2):
            raise InputError(f"correctness must be (images,) or (seeds, images); got shape {array.shape}")
        means.append(array if array.ndim == 1 else array.mean(axis=0))
    a, b = means
    if a.shape != b.shape:
        raise InputError(f"a paired difference needs the same images: got {a.size} and {b.size} images")
    return mean_interval(a - b)
