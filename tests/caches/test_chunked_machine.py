"""FixedCapacityChunkedCache against a list of token ids: whatever is done to it, each token sees what it may see."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from cache_machine import CacheMachine
from cache_oracle import chunked


class ChunkedCacheMachine(CacheMachine):
    """Chunks of 1 to 9 tokens."""

    kinds = st.builds(chunked, st.integers(1, 9))


TestChunkedCache = ChunkedCacheMachine.TestCase
TestChunkedCache.settings = settings(max_examples=40, stateful_step_count=20)
