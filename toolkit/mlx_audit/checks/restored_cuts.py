"""Shorter prefixes of an entry, and the number of tokens that each layer says it holds."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from mlx_audit.checks.base import CheckFailed, Figures
from mlx_audit.checks.content import leaves
from mlx_audit.checks.restored_runs import (
    LAST,
    Continued,
    Prefix,
    RestoreCheck,
    edges,
    prompts,
    refusal_of,
    turned,
    twin,
)
from mlx_audit.checks.runs import Eager, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.prefix import PrefixCache, PrefixRefused, Reason
from mlx_audit.prefix.snapshot import Snapshot

_BUDGET = 1 << 28
_ONWARDS = (1, 2)


class CutsEqualColdOrRefused(RestoreCheck):
    """Each shorter prefix of an entry equals a cold run, or is refused for the right reason.

    What it does:
        Takes snapshots after a prompt that no ring has forgotten anything of, after a longer one, and after rings have
        turned, and asks for shorter prefixes: 1 token, half, the last chunk's start, one and two tokens less, and
        around each window. What is given must equal a cold run that had stopped there, array by array, and go on as
        that does. What is refused must be refused for a reason that the native caches give: a recurrent state, a ring
        that has turned, rows of a chunk that are gone. A prefix of nothing, or longer than the entry, is refused; a
        refusal changes nothing.

    Why:
        A forced cut of a turned ring is right or wrong by the length of what follows, and a cut that only some layers
        can follow leaves the others ahead.

    Example:
        20 of a prompt of 13 tokens and 11 decoded was given, though a layer refuses with wrapped-ring

    How to fix:
        Ask every layer before any is cut; refuse the whole where one of them cannot.

    Sources:
        ml-explore/mlx-lm#1494, #1776, PR 1254 (states reset by a trim), PR 1186 (no trim at all)
    """

    code = "RST005"
    tier = "numeric"
    claim = "prefix_restore"
    requires = ("RST001", "RST002")
    repeated = False

    def prove(self, subject: Subject) -> Figures:
        continued, refused = Continued(), Counter[str]()
        given = 0
        for start in [*prompts(subject.model), turned(subject.model)]:
            tokens = teacher_tokens(subject, start.length + max(_ONWARDS), stream=44)
            for prefix in self._cuts(subject, start):
                reason = self._cut(subject, start, prefix, tokens, continued)
                given += reason is None
                refused.update([reason.value] if reason is not None else [])
        continued.require_equal()
        return {"cuts": given, "refused": dict(sorted(refused.items())), **continued.figures()}

    @staticmethod
    def _cuts(subject: Subject, start: Prefix) -> list[int]:
        near = {size + step for size in edges(subject.model) for step in (-1, 0, 1)}
        wanted = {1, start.length // 2, start.prompt - LAST, start.length - 2, start.length - 1, *near}
        return sorted(prefix for prefix in wanted if 0 < prefix < start.length)

    @staticmethod
    def _cut(
        subject: Subject, start: Prefix, prefix: int, tokens: Sequence[int], continued: Continued
    ) -> Reason | None:
        """Take one prefix of a run whose chunks end there, too; return why it was refused, or None."""
        run = Eager(subject.model)
        run.feed(tokens[:prefix])
        cold = twin(run)
        if prefix < start.prompt:
            run.feed(tokens[prefix : start.prompt])
        for token in tokens[max(prefix, start.prompt) : start.length]:
            run.feed([token])
        snapshot = Snapshot.take(run.cache, start.length)
        before, label = snapshot.digest(), f"{prefix} of {start}"
        for none in (0, start.length + 1):
            if refusal_of(lambda wanted=none: snapshot.restore(wanted)) is not Reason.POSITION_MISMATCH:
                raise CheckFailed(f"a prefix of {none} tokens of {start} was not refused", where=label)
        expected = {reason for native in leaves(run.cache) for reason in reasons(native, prefix)}
        try:
            caches = [snapshot.restore(prefix) for _ in _ONWARDS]
        except PrefixRefused as error:
            if error.reason not in expected:
                told = ", ".join(sorted(expected)) or "nothing"
                raise CheckFailed(
                    f"{label} was refused with {error.reason.value}, and the caches give {told}", where=label
                ) from error
            if snapshot.digest() != before:
                raise CheckFailed(f"refusing {label} changed the entry", where=label) from error
            return error.reason
        for count, restored in zip(_ONWARDS, caches, strict=True):
            continued.go_on(restored, twin(cold), tokens[prefix : prefix + count], label)
        if expected:
            told = ", ".join(sorted(expected))
            continued.wrong.append(f"{label} was given, though a layer refuses with {told}")
        return None


class PositionsAreTheKeys(RestoreCheck):
    """Every layer holds as many tokens as its key has; another number is refused.

    What it does:
        Makes each layer that counts its tokens say one more and one less: the whole stack must be refused. Inserts
        sound caches under a key that is one token longer, and one shorter: refused, and nothing is stored. After a
        restore every layer that counts says the length of the prefix.

    Why:
        Nearly every silent fault of prefix reuse is one of three lengths that differs from the others: the key, the
        rows of attention, the place of the recurrent state.

    Example:
        cache 1 (KVCache) said 14 for a key of 13 tokens, and was stored

    How to fix:
        Carry a position with every layer, and compare it on the way in and out. A recurrent state counts nothing:
        beside a layer that counts it is believed, alone the caller has to say where it stands.

    Sources:
        sgl-project/sglang#39209, #34760; vllm-project/vllm#51094
    """

    code = "RST006"
    tier = "numeric"
    claim = "prefix_restore"
    requires = ("RST001",)
    repeated = False

    def prove(self, subject: Subject) -> Figures:
        start = prompts(subject.model)[0]
        tokens = teacher_tokens(subject, start.length + 1, stream=45)
        run = start.run(subject.model, tokens)
        restored = Snapshot.take(run.cache, start.length).restore()
        parts = leaves(run.cache)
        counted = [index for index, native in enumerate(parts) if hasattr(native, "offset")]
        for index in counted:
            for step in (-1, 1):
                altered = copy.deepcopy(run.cache)
                leaves(altered)[index].offset += step
                self._require_refused(
                    lambda stack=altered: Snapshot.take(stack, start.length),
                    f"cache {index} ({type(parts[index]).__name__}) said {start.length + step} for a key of "
                    f"{start.length} tokens",
                )
        kept = PrefixCache(subject.model, _BUDGET)
        for count in (start.length - 1, start.length + 1):
            self._require_refused(
                lambda key=tokens[:count]: kept.insert(key, run.cache, position=start.length),
                f"caches of {start.length} tokens came under a key of {count}",
            )
        if len(kept):
            raise CheckFailed(f"{len(kept)} entries are stored after every insertion was refused")
        for index, native in enumerate(leaves(restored)):
            if getattr(native, "offset", start.length) != start.length:
                raise CheckFailed(f"restored cache {index} says {native.offset}, wanted {start.length}")
        return {
            "counted": len(counted),
            "uncounted": len(parts) - len(counted),
            "refused": 2 * len(counted) + 2,
        }

    @staticmethod
    def _require_refused(act: Any, what: str) -> None:
        found = refusal_of(act)
        if found is None:
            raise CheckFailed(f"{what}, and was stored", where=what)
        if found is not Reason.POSITION_MISMATCH:
            raise CheckFailed(f"{what}, and was refused with {found.value}", where=what)


def reasons(native: Any, prefix: int) -> Iterator[Reason]:
    """Yield why a native cache cannot be cut to fewer tokens than it holds, by its own class and counters.

    Said anew here, so that the table of rules does not vouch for itself.
    """
    if isinstance(native, ArraysCache):
        yield Reason.RECURRENT_OFF_BOUNDARY
    elif isinstance(native, RotatingKVCache) and native.offset > native.max_size:
        yield Reason.WRAPPED_RING
    elif isinstance(native, ChunkedKVCache) and native.start_position:
        if prefix <= native.start_position:
            yield Reason.PARTIAL_TRIM
        elif prefix - native.chunk_size < native.start_position:
            yield Reason.WINDOW_SLID
