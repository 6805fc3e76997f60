"""RST on every kind of cache: healthy stacks pass, each fault is seen, and logits alone would have missed some."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from audited import green, healthy, mutated, new_subject, only, red
from kind_models import kind_subject, new_kind_subject
from mlx_audit.checks.base import all_checks
from mlx_audit.checks.restored_runs import Prefix, prompts, state_differences, suffixes, turned
from mlx_audit.checks.runs import Eager
from mlx_audit.checks.subject import Subject
from mlx_audit.evidence.codes import RESTORE
from mlx_audit.faults import FAULTS
from mutations import MUTATIONS

CODES = tuple(check.code for check in all_checks() if check.claim == RESTORE)
KINDS = ("linear", "rotating", "keeping", "chunked", "quantized", "arrays", "composite", "composite_of_slots")
TRAITS = {
    "linear": "linear slots trims alike",
    "rotating": "linear rotating slots",
    "keeping": "rotating slots keep alike",
    "chunked": "chunked slots alike",
    "quantized": "quantized slots trims alike",
    "arrays": "arrays alike",
    "composite": "composite arrays linear slots alike",
    "composite_of_slots": "composite linear slots alike",
}


def subject_of(kind: str) -> Subject:
    """Return the shared subject of a kind."""
    return healthy() if kind == "linear" else kind_subject(kind)


@functools.cache
def figures(code: str, kind: str) -> dict[str, Any]:
    """Return what a check measures on a kind, on which it must pass."""
    return green(code, subject_of(kind)).figures


def test_there_are_eight() -> None:
    assert sorted(CODES) == [f"RST00{number}" for number in range(1, 9)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", CODES)
def test_healthy(code: str, kind: str) -> None:
    figures(code, kind)


PAIRS = [
    (kind, name)
    for name, fault in FAULTS.items()
    if fault.by in CODES and fault.by != "RST008"
    for kind in KINDS
    if fault.applies(TRAITS[kind].split())
]


def test_every_fault_has_a_kind_here() -> None:
    assert {name for _, name in PAIRS} == {n for n, f in FAULTS.items() if f.by in CODES and f.by != "RST008"}


HOMES = list({name: (kind, name) for kind, name in reversed(PAIRS)}.values())
"""Each fault in the first kind that it applies to."""


@pytest.mark.parametrize(("kind", "name"), HOMES)
def test_red(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    red(FAULTS[name].by, subject_of(kind))


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "name"), sorted({*PAIRS} - {*HOMES}))
def test_red_elsewhere(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    red(FAULTS[name].by, subject_of(kind))


BLIND = (
    ("keeping", "restored_without_what_is_kept", 0.0),
    ("rotating", "snapshot_keeps_the_oldest_rows", 0.0),
    ("chunked", "chunk_start_forgotten", 0.0),
    ("arrays", "restored_one_token_old", 0.01),
)
"""Faults that some suffix hides from the logits, and the most that they read there."""


@pytest.mark.parametrize(("kind", "name", "most"), BLIND)
def test_logits_alone_are_blind_after_some_suffix(
    kind: str, name: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[name](monkeypatch)
    found = red(FAULTS[name].by, subject_of(kind))
    assert "as it was restored: cache 0" in found.reason
    alone = found.figures["logits_alone"]
    assert min(alone.values()) <= most
    assert found.figures["differences"] >= len(alone)


def test_a_state_three_tokens_old_is_seen_before_a_token_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["restored_three_tokens_old"](monkeypatch)
    assert red("RST001", kind_subject("arrays")).reason.startswith(
        "a prompt of 13 tokens, as it was restored: cache 0 (ArraysCache), array 0, differs by"
    )


def test_state_outside_the_caches_is_lost(tmp_path: Path) -> None:
    module = mutated(tmp_path, *MUTATIONS["counter_on_module"])
    found = red("RST008", new_subject(module=module))
    assert "suffix 1: cache 0 (KVCache), array 0, differs by" in found.reason
    assert "as it was restored" not in found.reason


def test_what_was_looked_at() -> None:
    assert figures("RST001", "rotating") == {
        "prefixes": [13, 6],
        "suffixes": [1, 2, 7, 8, 9, 15, 16, 17],
        "arrays_compared": 256,
    }
    assert figures("RST002", "rotating")["decoded"] == 11
    assert figures("RST005", "arrays")["refused"] == {"recurrent-off-boundary": 10}
    assert set(figures("RST005", "rotating")["refused"]) == {"wrapped-ring"}
    assert set(figures("RST005", "chunked")["refused"]) == {"partial-trim", "window-slid"}
    assert figures("RST005", "linear")["refused"] == {}
    assert figures("RST006", "composite") == {"counted": 4, "uncounted": 4, "refused": 10}
    assert figures("RST007", "linear")["restored"] == 2


def test_a_variant_that_does_not_decode_compiled_is_restored_eagerly() -> None:
    subject = new_subject(decodes=False)
    assert only("RST007", subject).status == "not-applicable"
    green("RST001", subject)


def test_other_rope_kinds_are_looked_at_briefly() -> None:
    found = green("RST001", new_subject(main=False)).figures
    assert (found["suffixes"], found["prefixes"]) == ([1, 17], [13])
    assert only("RST002", new_subject(main=False)).status == "not-applicable"


def test_a_class_without_a_rule_leaves_all_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = new_kind_subject("rotating")

    class Own(KVCache):  # type: ignore[misc]
        """A subclass may mean something else by an update."""

    make = type(subject.model).make_cache
    monkeypatch.setattr(
        type(subject.model), "make_cache", lambda self: [make(self)[0], Own(), *make(self)[2:]]
    )
    for code in CODES:
        found = only(code, subject)
        assert found.status == "not-run", (code, found.status, found.reason)
        assert "unknown-class" in found.reason


def test_prefixes_walk_around_the_window() -> None:
    model = kind_subject("rotating").model
    assert suffixes(model) == [1, 2, 7, 8, 9, 15, 16, 17]
    assert prompts(model) == [Prefix(13), Prefix(6)]
    assert turned(model) == Prefix(13, 11)
    assert [Eager(model).cache[0].max_size, turned(model).length > 2 * 8] == [8, True]


def test_the_oracle_sees_each_thing_that_may_differ() -> None:
    model = kind_subject("composite").model
    run = Prefix(13).run(model, list(range(20)))
    assert state_differences(run.cache, run.cache) == (16, [])

    def differs(change: Any) -> str:
        other = copy.deepcopy(run.cache)
        change(other)
        return "; ".join(state_differences(other, run.cache)[1])

    def moved(caches: list[Any]) -> None:
        caches[1].caches[1].keys = caches[1].caches[1].keys + 1e-6

    def emptied(caches: list[Any]) -> None:
        caches[0].caches[0].cache[1] = None

    def later(caches: list[Any]) -> None:
        caches[3].caches[1].offset -= 1

    def halved(caches: list[Any]) -> None:
        caches[2].caches[0].cache[0] = caches[2].caches[0].cache[0].astype(mx.float16)

    assert "cache 3 (KVCache), array 0, differs by" in differs(moved)
    assert "cache 0 (ArraysCache) says slots [True, False], wanted [True, True]" in differs(emptied)
    assert "cache 7 (KVCache) says offset 12, wanted 13" in differs(later)
    assert "cache 4 (ArraysCache) holds" in differs(halved)
    assert state_differences(run.cache[:2], run.cache)[1][0].startswith("the caches are ArraysCache")
