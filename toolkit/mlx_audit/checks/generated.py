"""Does a compiled session generate the tokens that an eager loop does?"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlx_audit.caches import host_int
from mlx_audit.checks.base import Check, CheckFailed, Figures
from mlx_audit.checks.runs import PROMPT, Eager, session_for, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.decode.session import Sampler

_TEMPERATURE, _TOP_P = 0.8, 0.9


class GreedyTokens(Check):
    """Greedy tokens equal eager decoding.

    What it does:
        Generates greedily with a compiled session and eagerly, from the same prompt, and compares the tokens. The
        tiny model's matrices are scaled so that its greedy tokens vary.

    Why:
        Tokens are what a user sees. This is the weakest parity check: it only adds to the comparison of logits.

    Example:
        token 5 is 17, wanted 42

    How to fix:
        See PAR001.

    Sources:
        mlx_lm/generate.py generate_step
    """

    code = "PAR002"
    tier = "numeric"
    requires = ("PAR001",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        return _compared(subject, sampler=None, stream=1)


class SampledTokens(Check):
    """Sampled tokens equal eager decoding under one seed.

    What it does:
        Generates with mlx-lm's sampler (temperature 0.8, top-p 0.9) with a compiled session and in an eager loop,
        MLX's random numbers seeded alike before each, and compares the tokens; for two seeds.

    Why:
        A session that draws once too often, hands the sampler logits instead of log-probabilities, or lets a compiled
        step touch the random state, gives text that is as fluent and not reproducible.

    Example:
        token 5 is 17, wanted 42, under seed 0

    How to fix:
        Call the sampler once a token, on log-probabilities; draw no random number in the step.

    Sources:
        mlx_lm/generate.py generate_step; mlx_lm/sample_utils.py make_sampler
    """

    code = "PAR006"
    tier = "numeric"
    requires = ("PAR002",)
    repeated = False

    def run(self, subject: Subject) -> Figures:
        sampler = make_sampler(temp=_TEMPERATURE, top_p=_TOP_P)
        runs = [_compared(subject, sampler, stream=1, seed=subject.seed + more) for more in (0, 1)]
        return {"temperature": _TEMPERATURE, "top_p": _TOP_P, "runs": runs}


def _compared(subject: Subject, sampler: Sampler | None, *, stream: int, seed: int | None = None) -> Figures:
    """Generate on both sides and require the same tokens."""
    count = subject.amounts.steps
    prompt = teacher_tokens(subject, PROMPT, stream=stream)
    session = session_for(subject, PROMPT + count)
    under = "" if seed is None else f", under seed {seed}"
    mx.random.seed(subject.seed if seed is None else seed)
    wanted = _eagerly(subject, prompt, count, sampler)
    mx.random.seed(subject.seed if seed is None else seed)
    got = list(session.generate(prompt, max_new_tokens=count, sampler=sampler))
    for index, (token, want) in enumerate(zip(got, wanted, strict=True)):
        if token != want:
            raise CheckFailed(
                f"token {index} is {token}, wanted {want}{under}", where=f"token {index}{under}"
            )
    return {"tokens": count, "distinct_tokens": len(set(got))}


def _eagerly(subject: Subject, prompt: list[int], count: int, sampler: Sampler | None) -> list[int]:
    """Return the tokens of an eager loop that samples as mlx-lm's `generate_step` does; greedy ones by default."""
    eager, tokens = Eager(subject.model), list[int]()
    logits = eager.feed(prompt)
    for _ in range(count):
        if sampler is None:
            choice = mx.argmax(logits, axis=-1)
        else:
            choice = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        tokens.append(host_int(choice))
        logits = eager.feed([tokens[-1]])
    return tokens
