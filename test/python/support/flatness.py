"""Growth of a series of samples of a running program."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# A wave of this many deviations around a flat line passes for noise.
DEVIATIONS = 3.0


class Trend(NamedTuple):
    level: float  # the median
    growth: float  # of the line through the samples, from the first to the last
    noise: float  # the deviation of the samples from that line

    def is_flat(self, floor: float) -> bool:
        """Returns true if the series grows by at most ``floor``, or by no more than the noise explains."""
        return self.growth <= max(floor, DEVIATIONS * self.noise)


def trend_of(samples: Sequence[float]) -> Trend:
    """By Theil and Sen: the median of the slopes between all pairs, which single outliers leave as it is.

    Samples are taken at equal distances. The noise is the median deviation, as a standard deviation.
    """
    if len(samples) < 3:
        raise ValueError(f"a trend needs 3 samples or more, there are {len(samples)}")
    pairs = itertools.combinations(enumerate(samples), 2)
    slope = statistics.median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)
    rest = [sample - slope * i for i, sample in enumerate(samples)]
    middle = statistics.median(rest)
    noise = 1.4826 * statistics.median(abs(one - middle) for one in rest)
    return Trend(statistics.median(samples), slope * (len(samples) - 1), noise)
