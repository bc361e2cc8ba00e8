"""Growth over steps, fitted robustly and told apart from warm-up.

The rate is the Theil-Sen slope: the median of the slopes of all pairs of points, which a third of outliers does not
move. Its interval is Sen's, from the variance of Kendall's rank correlation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import sqrt
from statistics import median

_MOST_POINTS = 64  # 2,016 pairs, a millisecond
_SIGMAS = 3.0  # one series in 700 without growth gets a positive lower bound
_LAST_SHARE = 0.3  # of the whole rate; what slows down more is a cache that fills
LEAST_POINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of a series of measurements.

    Attributes:
        rate: The growth for each step, in the unit of the series.
        total: The growth over all points, by the rate.
        goes_on: Whether the series certainly grows, in its last third too.
        slowed: Whether the series grew and then stopped, as after warm-up or when a cache is full.
    """

    rate: float
    least_rate: float
    total: float
    goes_on: bool
    slowed: bool


STEADY = Growth(rate=0.0, least_rate=0.0, total=0.0, goes_on=False, slowed=False)


def fit_growth(steps: Sequence[int], values: Sequence[float], *, least_total: float = 0.0) -> Growth:
    """Fit the growth of a series; a series of fewer than `LEAST_POINTS` points counts as steady."""
    if len(steps) < LEAST_POINTS or len(steps) != len(values):
        return STEADY
    points = thin(list(zip(steps, values, strict=True)))
    rate, least = theil_sen(points)
    total = rate * (steps[-1] - steps[0])
    grew = least > 0 and total > least_total
    last_rate, _ = theil_sen(points[-(len(points) // 3) :])
    goes_on = grew and last_rate >= _LAST_SHARE * rate
    return Growth(rate=rate, least_rate=least, total=total, goes_on=goes_on, slowed=grew and not goes_on)


def is_fragmented(growth: Mapping[str, Growth]) -> bool:
    """Return whether an allocator of host or device takes more memory while the memory in use does not grow."""
    on_host = growth["resident"].goes_on and growth["heap_free"].goes_on and not growth["heap_used"].goes_on
    on_device = growth["device_reserved"].goes_on and not growth["device_allocated"].goes_on
    return on_host or on_device


def theil_sen(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of the slopes of all pairs of points, and the lower bound of its interval."""
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2))
    n = len(points)
    spread = _SIGMAS * sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return median(slopes), slopes[max(0, int((len(slopes) - spread) / 2))]


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Divide points into at most `_MOST_POINTS` equal parts, and return the median of each part."""
    if len(points) <= _MOST_POINTS:
        return points
    edges = [i * len(points) // _MOST_POINTS for i in range(_MOST_POINTS + 1)]
    parts = [points[start:end] for start, end in pairwise(edges)]
    return [(median(x for x, _ in part), median(y for _, y in part)) for part in parts]
