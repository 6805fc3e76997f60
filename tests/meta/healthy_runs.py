"""Random healthy stacks, and what must not be said of them: a failed check, or one that could not be run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from audited import check
from mlx_audit.adapters import snapshots_reused
from mlx_audit.checks import profiles
from mlx_audit.checks.base import execute
from mlx_audit.checks.runs import Comparer, Eager, rungs_of, session_for, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.faults.topologies import TOPOLOGIES, Topology
from mlx_audit.manifests import find_manifest
from mlx_audit.models.build import resolve_arguments
from mlx_audit.models.modules import import_file, import_model

NUMERIC = (
    *("ENV001", "PAR001", "PAR002", "PAR003", "PAR004", "PAR005", "PAR006", "STA001", "STA002", "STA003"),
    *("STA004", "STA005", "STA006", "MSK001", "MSK002", "MSK003", "MSK005", "CAP001", "CAP002", "CAP003"),
    *("LIF001", "LIF002", "LIF004"),
)
TRACE = ("TRC001", "TRC002", "TRC003", "TRC004", "TRC005")
SMALL = replace(
    profiles.PROFILES["quick"], examples=2, steps=5, sessions=2, late=((250, 3, 600),), dtypes=("float32",)
)
_HALF = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class HealthyRun:
    """One stack, one text, and the checks to ask.

    Attributes:
        topology: Whose kinds of cache it has.
        changes: Of the configuration.
        prompt, chunk, steps, more, room: Tokens of the text: read at first, in chunks; stepped; continued with at
            once; and left free.
    """

    topology: str
    changes: tuple[tuple[str, Any], ...]
    seed: int
    dtype: str
    prompt: int
    chunk: int
    steps: int
    more: int
    room: int
    codes: tuple[str, ...]


@st.composite
def healthy_runs(draw: st.DrawFn) -> HealthyRun:
    """Draw a run; every kind of cache, size, dtype and length that the tiny models can have."""
    topology = draw(st.sampled_from(TOPOLOGIES))
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    layers = draw(st.integers(1, 4))
    changes: dict[str, Any] = {"vocab_size": draw(st.integers(40, 90))}
    if topology.family in ("", "llama"):
        changes |= {
            "num_hidden_layers": layers,
            "hidden_size": draw(st.sampled_from((16, 32, 48))),
            "intermediate_size": draw(st.sampled_from((16, 32, 40))),
            "num_attention_heads": kv_heads * groups,
            "num_key_value_heads": kv_heads,
            "head_dim": 32 if topology.name == "quantized" else draw(st.sampled_from((4, 8, 16, 32))),
            "rope_traditional": draw(st.booleans()),
            "tie_word_embeddings": draw(st.booleans()),
        }
    if topology.name == "rotating":
        kinds = st.sampled_from(("sliding_attention", "full_attention"))
        # mlx-lm's llama takes one layer of each kind for granted.
        names = draw(
            st.permutations(["sliding_attention", "full_attention", *draw(st.lists(kinds, max_size=2))])
        )
        changes |= {
            "num_hidden_layers": len(names),
            "layer_types": names,
            "sliding_window": draw(st.integers(2, 12)),
        }
    # Recurrent and mixed families compute their state in float32 or in steps of their own: one dtype is enough.
    dtype = draw(st.sampled_from(_HALF)) if topology.family in ("", "llama") else "float32"
    return HealthyRun(
        topology.name,
        tuple(changes.items()),
        draw(st.integers(0, 2**32 - 1)),
        dtype,
        prompt=draw(st.integers(1, 40)),
        chunk=draw(st.integers(1, 40)),
        steps=draw(st.integers(1, 12)),
        more=draw(st.integers(1, 12)),
        room=draw(st.integers(0, 300)),
        codes=(
            draw(st.sampled_from(TRACE)),
            *draw(st.lists(st.sampled_from(NUMERIC), min_size=2, max_size=2)),
        ),
    )


def false_alarms(run: HealthyRun) -> list[str]:
    """Return what the audit says against a healthy run; nothing, if it is as good as it should be."""
    topology = next(t for t in TOPOLOGIES if t.name == run.topology)
    found = []
    own, profiles.PROFILES["quick"] = profiles.PROFILES["quick"], SMALL
    try:
        with snapshots_reused():
            subject = _subject(topology, run)
            for code in run.codes:
                result = execute(check(code), subject, {})
                if result.status in ("fail", "not-run") and code not in topology.unsound:
                    found.append(f"{code} {result.status}: {result.reason}")
            found += _text(subject, run, exact_chunks="PAR004" not in topology.unsound)
    finally:
        profiles.PROFILES["quick"] = own
    return found


def _text(subject: Subject, run: HealthyRun, *, exact_chunks: bool) -> list[str]:
    """Read the run's text both ways; return what differs."""
    count = run.prompt + run.steps + (run.more if exact_chunks else 0)
    tokens = teacher_tokens(subject, count + 1, stream=30)
    chunk = run.chunk if exact_chunks else run.prompt
    session = session_for(subject, count + 1 + run.room, prefill_step_size=chunk)
    eager, comparer, at = Eager(subject.model), Comparer(subject.tolerance), run.prompt
    stepped = []
    try:
        want = eager.feed(tokens[:at], chunk=chunk)
        comparer.check(session.prefill([tokens[:at]]), want, "the prompt")
        for length in (*[1] * run.steps, *([run.more] if exact_chunks else []), 1):
            piece = tokens[at : at + length]
            got = session.step(piece) if length == 1 else session.extend([piece])
            at += length
            stepped += [at] if length == 1 else []
            comparer.check(got, eager.feed(piece), f"{length} more, to {at}")
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    wanted = len(rungs_of(session, stepped))
    return [] if session.trace_count == wanted else [f"{session.trace_count} traces, wanted {wanted}"]


def _subject(topology: Topology, run: HealthyRun) -> Subject:
    module, config = _base(topology.name)
    own = {**config, **dict(run.changes)}
    resolve_arguments(module, own)
    exactness = "" if topology.family in ("", "llama") else _exactness(topology)
    mx.random.seed(run.seed % 1000)
    return Subject(
        topology.family or topology.name,
        "drawn",
        "tiny",
        module,
        own,
        own,
        exactness=exactness,
        dtype=run.dtype,
        seed=run.seed,
    )


@functools.cache
def _base(name: str) -> tuple[ModuleType, Mapping[str, Any]]:
    topology = next(t for t in TOPOLOGIES if t.name == name)
    if topology.file is not None:
        return import_file(topology.file), topology.config
    manifest = find_manifest(topology.family)
    assert manifest is not None
    return import_model(manifest.module), manifest.variants[topology.variant].tiny


def _exactness(topology: Topology) -> str:
    manifest = find_manifest(topology.family)
    assert manifest is not None
    return manifest.variants[topology.variant].exactness
