"""FixedCapacityCacheList against a list of token ids: whatever is done to it, each token sees what it may see."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from cache_machine import CacheMachine
from cache_oracle import chunked, composite, linear, quantized, rotating


class CompositeCacheMachine(CacheMachine):
    """Caches of several kinds in one entry, nested too."""

    kinds = st.sampled_from(
        [
            composite(linear(), rotating(4)),
            composite(rotating(3), composite(chunked(4), linear())),
            composite(quantized(8), rotating(5, 2)),
            composite(composite(linear())),
        ]
    )


TestCompositeCache = CompositeCacheMachine.TestCase
TestCompositeCache.settings = settings(max_examples=40, stateful_step_count=20)
