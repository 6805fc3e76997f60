"""FixedCapacityRotatingCache against a list of token ids: whatever is done to it, each token sees what it may see."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from cache_machine import CacheMachine
from cache_oracle import rotating


class RotatingCacheMachine(CacheMachine):
    """Rings of 1 to 9 tokens, of which any number but the last is kept."""

    kinds = st.builds(rotating, st.integers(1, 9)) | st.integers(2, 9).flatmap(
        lambda window: st.builds(rotating, st.just(window), st.integers(1, window - 1))
    )


TestRotatingCache = RotatingCacheMachine.TestCase
TestRotatingCache.settings = settings(max_examples=80, stateful_step_count=12)
