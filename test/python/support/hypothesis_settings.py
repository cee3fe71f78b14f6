"""Settings of tests on examples that hypothesis draws."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def checked(most: int) -> settings:
    """At most ``most`` examples, the same in each run, however long each takes. A failing one is shrunk."""
    return settings(
        max_examples=most,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
