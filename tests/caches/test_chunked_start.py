"""Where the kept tokens of a chunked cache begin, which mlx-lm's models read by name."""

from __future__ import annotations

import pytest

from cache_oracle import adopted, chunked, feed, filled_native


@pytest.mark.parametrize("held", range(1, 14))
def test_the_oldest_token_is_the_one_that_the_native_cache_keeps(held: int) -> None:
    cache = adopted(chunked(4), [list(range(1, held + 1))], 3, 30)
    native = filled_native(chunked(4), [list(range(1, held + 1))], 3)
    native.maybe_trim_front()
    assert cache.start_position.tolist() == [native.start_position]
    feed(cache, chunked(4), [[99]])
    assert cache.start_position.tolist() == [max(0, held + 1 - 4)]
