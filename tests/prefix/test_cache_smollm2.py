"""SmolLM2 behind a system prompt of 1,000 tokens: the second request answers at once, with the same text."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import pytest

from mlx_audit.models.gguf import read_gguf
from mlx_audit.models.smollm2 import smollm2_path
from mlx_audit.prefix import PrefixCache
from tiny_models import raw

pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.nightly]
SHARED = 1000
ANSWER = 16


def asked(tokenizer: Any, question: str) -> list[int]:
    """Return the same 1,000 tokens, then a question."""
    rules = "".join(f"Rule {number}: answer question {number} in one sentence.\n" for number in range(200))
    system = tokenizer.encode(f"<|im_start|>system\n{rules}")[: SHARED - 3]
    system += tokenizer.encode("<|im_end|>\n")
    system = system + tokenizer.encode("\n" * (SHARED - len(system)))
    assert len(system) == SHARED
    turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return system + list(tokenizer.encode(turn))


def answered(cache: PrefixCache, prompt: list[int]) -> tuple[float, list[int], bytes]:
    """Return the seconds to the first token, the greedy answer, and the first logits."""
    start = time.perf_counter()
    logits, caches, _ = cache.prefill(prompt, stops=[SHARED])
    found = [int(mx.argmax(logits[0]).item())]
    spent, first = time.perf_counter() - start, raw(logits.astype(mx.float32))
    while len(found) < ANSWER:
        logits = cache.model(mx.array([found[-1:]]), cache=caches)[:, -1]
        found.append(int(mx.argmax(logits[0]).item()))
    return spent, found, first


def test_the_second_request_is_ten_times_faster_and_says_the_same() -> None:
    checkpoint = read_gguf(smollm2_path())
    model, tokenizer = checkpoint.load_model(), checkpoint.load_tokenizer()
    cache = PrefixCache(model, 1 << 30)
    answered(cache, asked(tokenizer, "Who wrote Hamlet?"))
    question = asked(tokenizer, "What is the capital of France?")
    warm = answered(cache, question)
    cold = answered(PrefixCache(model, 1 << 30), question)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.cached_tokens) == (1, 1, SHARED)
    assert warm[1:] == cold[1:]
    assert "Paris" in tokenizer.decode(warm[1])
    assert cold[0] >= 10 * warm[0], f"cold {cold[0]:.3f} s, warm {warm[0]:.3f} s"
    mx.clear_cache()
