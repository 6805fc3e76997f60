"""What is restored goes on as what was never interrupted: after a prompt, after decoding, and through a file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlx_audit.checks.base import CheckFailed, Figures
from mlx_audit.checks.restored_runs import (
    Continued,
    Prefix,
    RestoreCheck,
    edges,
    prompts,
    suffixes,
    turned,
    twin,
)
from mlx_audit.checks.runs import teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.prefix import Fingerprint, store
from mlx_audit.prefix.snapshot import Snapshot

_FEW = (1, 17)


class RestoredEqualsCold(RestoreCheck):
    """A restored prompt goes on as a cold run on the same chunks does.

    What it does:
        Reads a prompt in two chunks, takes a snapshot, and goes on by 1, 2, 15, 16 and 17 tokens and by each window,
        one less and one more. A cold run, from empty caches, reads the same chunks. All arrays of all caches must be
        equal in every bit, as restored and after the suffix, and so must the logits. Prompts are shorter and longer
        than each window.

    Why:
        A state that is a few tokens old goes on fluently. Logits are a weak witness: they may be off by 3 at the next
        token, and by nothing 32 tokens later, while the state is still wrong. The chunks must be the same, since
        other chunks round otherwise.

    Example:
        a prompt of 13 tokens, as it was restored: cache 0 (ArraysCache), array 1, differs by 2.2; logits alone read 0
        to 3.4

    How to fix:
        Take the snapshot when the last token of its key has been fed; copy what the class keeps, cursors included.

    Sources:
        ml-explore/mlx-lm PR 1596; sgl-project/sglang#31833 (states wrong, two benchmarks passed)
    """

    code = "RST001"
    tier = "numeric"
    claim = "prefix_restore"

    def prove(self, subject: Subject) -> Figures:
        model, continued = subject.model, Continued()
        # Where only the RoPE kind is another one, the caches are the same.
        starts = prompts(model) if subject.main else prompts(model)[:1]
        for start in starts:
            lengths = suffixes(model) if subject.main else _FEW
            tokens = teacher_tokens(subject, start.length + max(lengths), stream=40)
            snapshot = _taken(subject, start, tokens)
            for length in lengths:
                cold = start.run(model, tokens)
                suffix = tokens[start.length : start.length + length]
                continued.go_on(snapshot.restore(), cold, suffix, str(start))
        continued.require_equal()
        return {"prefixes": [start.length for start in starts], **continued.figures()}


class RestoredAfterDecoding(RestoreCheck):
    """What is restored after tokens were decoded goes on as if nothing had been.

    What it does:
        Reads a prompt and decodes until every ring has turned, takes a snapshot, and goes on by the lengths of RST001.
        The first of them is compared with a second cold run, the others with deep copies of it.

    Why:
        A ring that has turned is right only with its cursor. Right after a prompt the cursor is at the end, so a test
        there does not see that it was lost.

    Example:
        a prompt of 13 tokens and 11 decoded, suffix 1: cache 0 (RotatingKVCache), array 0, differs by 1.3

    How to fix:
        Restore cursor, offset and what is kept together with the rows, in the order in which they lie.

    Sources:
        ml-explore/mlx-swift-lm PR 584; scouzi1966/maclocal-api#94
    """

    code = "RST002"
    tier = "numeric"
    claim = "prefix_restore"
    requires = ("RST001",)
    repeated = False

    def prove(self, subject: Subject) -> Figures:
        model, continued, start = subject.model, Continued(), turned(subject.model)
        lengths = suffixes(model)
        tokens = teacher_tokens(subject, start.length + max(lengths), stream=41)
        snapshot, cold = _taken(subject, start, tokens), start.run(model, tokens)
        for length in lengths:
            suffix = tokens[start.length : start.length + length]
            continued.go_on(snapshot.restore(), twin(cold), suffix, str(start))
        continued.require_equal()
        return {"prompt": start.prompt, "decoded": start.decoded, **continued.figures()}


class RestoredFromFile(RestoreCheck):
    """A snapshot that went through a file goes on as one that stayed in memory.

    What it does:
        Saves a snapshot after a prompt and one after decoding into one store, loads it, and compares every byte with
        what was saved. Both go on by 1 and 17 tokens and by one more than each window, and must equal the cold run.

    Why:
        A file that holds less than the caches do restores without an error: a class that is looked up by name, a
        cursor that was left out, a dtype that was narrowed.

    Example:
        from the store, a prompt of 13 tokens: what was loaded is not what was saved

    How to fix:
        Write every array and every counter of each layer, and read them with the same form.

    Sources:
        ml-explore/mlx-lm#80; ggml-org/llama.cpp#25913 (success, and everything is computed again)
    """

    code = "RST003"
    tier = "numeric"
    claim = "prefix_restore"
    requires = ("RST001", "RST002")
    repeated = False

    def prove(self, subject: Subject) -> Figures:
        model, continued = subject.model, Continued()
        starts = [prompts(model)[0], turned(model)]
        lengths = sorted({*_FEW, *(size + 1 for size in edges(model))})
        tokens = teacher_tokens(subject, starts[-1].length + max(lengths), stream=42)
        colds = [start.run(model, tokens) for start in starts]
        pairs = zip(starts, colds, strict=True)
        saved = [(tokens[: start.length], Snapshot.take(cold.cache, start.length)) for start, cold in pairs]
        loaded, size = _through_file(saved)
        for start, cold, (_, before), after in zip(starts, colds, saved, loaded, strict=True):
            label = f"from the store, {start}"
            if after.digest() != before.digest():
                continued.wrong.append(f"{label}: what was loaded is not what was saved")
            for length in lengths:
                suffix = tokens[start.length : start.length + length]
                continued.go_on(after.restore(), twin(cold), suffix, label)
        continued.require_equal()
        return {"file_bytes": size, **continued.figures()}


def _taken(subject: Subject, start: Prefix, tokens: Sequence[int]) -> Snapshot:
    return Snapshot.take(start.run(subject.model, tokens).cache, start.length)


def _through_file(saved: Sequence[tuple[Sequence[int], Snapshot]]) -> tuple[list[Snapshot], int]:
    """Return snapshots as they come out of a store, and the bytes of its files."""
    world = Fingerprint(weights="audited")
    with tempfile.TemporaryDirectory(prefix="mlx-audit-") as folder:
        size = store.save(Path(folder), saved, world)
        entries = store.load(Path(folder), world, verify=True)
        if [entry.ids for entry in entries] != [list(tokens) for tokens, _ in saved]:
            raise CheckFailed("the store has other keys than were saved")
        return [entry.snapshot() for entry in entries], size
