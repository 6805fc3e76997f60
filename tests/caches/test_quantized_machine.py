"""FixedCapacityQuantizedCache against a list of token ids: whatever is done to it, each token sees what it may see."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from cache_machine import CacheMachine
from cache_oracle import quantized


class QuantizedCacheMachine(CacheMachine):
    """Keys and values in 4 and in 8 bits."""

    kinds = st.builds(quantized, st.sampled_from([4, 8]))


TestQuantizedCache = QuantizedCacheMachine.TestCase
TestQuantizedCache.settings = settings(max_examples=40, stateful_step_count=20)
