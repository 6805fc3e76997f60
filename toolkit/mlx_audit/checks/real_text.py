"""What the checkpoint tier feeds to real weights: English text and questions, or random ids without a tokenizer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_audit.checks.runs import PROMPT
from mlx_audit.checks.subject import Subject
from mlx_audit.models.checkpoint import chat_ids, text_ids, text_of

QUESTION = "What is the capital of France?"
SECOND_QUESTION = "And which river flows through it?"

PARAGRAPH = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way - in short, the period was "
    "so far like the present period, that some of its noisiest authorities insisted on its being received, for good or "
    "for evil, in the superlative degree of comparison only."
)
"""Charles Dickens, A Tale of Two Cities, 1859: in the public domain."""

_WITH_TEXT, _WITHOUT = 64, 16


class RealText:
    """Tokens for the checkpoint of a subject."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.model = subject.real.model
        self.tokenizer = subject.real.tokenizer

    @property
    def steps(self) -> int:
        """Tokens to compare: fewer of random ones."""
        return _WITHOUT if self.tokenizer is None else _WITH_TEXT

    def tokens(self, count: int) -> list[int]:
        """Return the first ids of the paragraph, repeated as often as need be; random ids without a tokenizer."""
        if self.tokenizer is None:
            logits = self.model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(self.model))
            generator = np.random.default_rng([self._subject.seed, 17])
            return [int(token) for token in generator.integers(0, logits.shape[-1], count)]
        ids = text_ids(self.tokenizer, PARAGRAPH)
        return (ids * -(-count // len(ids)))[:count]

    def prompt(self) -> list[int]:
        """Return the ids of a question, as a chat asks it."""
        if self.tokenizer is None:
            return self.tokens(PROMPT)
        return chat_ids(self.tokenizer, [_said("user", QUESTION)])

    def second_turn(self, held: list[int], reply: list[int]) -> list[int]:
        """Return what a chat appends to `held` (the prompt and the reply) with its second question."""
        if self.tokenizer is None:
            return self.tokens(2 * PROMPT)[PROMPT:]
        answer = text_of(self.tokenizer, reply)
        turns = [_said("user", QUESTION), _said("assistant", answer), _said("user", SECOND_QUESTION)]
        whole = chat_ids(self.tokenizer, turns)
        # Encoding a text again may split it elsewhere; then the question alone is as good a continuation.
        if whole[: len(held)] == held and len(whole) > len(held):
            return whole[len(held) :]
        return text_ids(self.tokenizer, SECOND_QUESTION)

    def says(self, tokens: list[int]) -> dict[str, str]:
        """Return the figure that shows what tokens say."""
        return {} if self.tokenizer is None else {"text": text_of(self.tokenizer, tokens)}


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
