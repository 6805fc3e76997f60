"""Paired ratios: their geometric mean, and a 95% interval by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_RESAMPLES = 4000


class Ratio(NamedTuple):
    """A geometric mean of ratios with the bounds of its 95% interval."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Return the three numbers, rounded to what they are worth."""
        return {name: round(value, 4) for name, value in self._asdict().items()}


def geometric_mean(groups: Sequence[Sequence[float]], *, seed: int = 0) -> Ratio:
    """Return the geometric mean of groups of positive ratios, each group counting the same.

    Args:
        groups: Ratios measured under one condition each; they are resampled within their group.
        seed: Of the bootstrap.
    """
    generator = np.random.default_rng(seed)
    logs = [np.log(np.asarray(group, dtype=np.float64)) for group in groups]
    samples = np.zeros(_RESAMPLES)
    for log in logs:
        drawn = generator.integers(0, len(log), (_RESAMPLES, len(log)))
        samples += log[drawn].mean(axis=1) / len(logs)
    low, high = np.quantile(samples, [0.025, 0.975])
    mean = sum(log.mean() for log in logs) / len(logs)
    return Ratio(float(np.exp(mean)), float(np.exp(low)), float(np.exp(high)))
