"""Settings of tests on examples that hypothesis draws."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def checked(most: int) -> settings:
    """Returns settings for ``most`` examples, the same in each run, without a deadline."""
    return settings(
        max_examples=most,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
