"""Random healthy stacks, and what must not be said of them: a failed check, or one that could not be run."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from audited import check
from mlx_audit.adapters import snapshots_reused
from mlx_audit.checks import profiles
from mlx_audit.checks.base import execute
from mlx_audit.checks.runs import Comparer, Eager, rungs_of, session_for, teacher_tokens
from mlx_audit.checks.subject import Subject
from mlx_audit.faults.topologies import TOPOLOGIES, Topology
from mlx_audit.manifests import find_manifest
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


def healthy_run(number: int) -> HealthyRun:
    """Return a run: kind of cache, sizes, dtype, seed, lengths and checks all drawn from its number."""
    draw = random.Random(number)
    topology = TOPOLOGIES[number % len(TOPOLOGIES)]
    plain = topology.family in ("", "llama")
    changes: dict[str, Any] = {"vocab_size": draw.randint(40, 90)}
    if plain:
        kv_heads = draw.randint(1, 2)
        changes |= {
            "num_hidden_layers": draw.randint(1, 4),
            "hidden_size": draw.choice((16, 32, 48)),
            "intermediate_size": draw.choice((16, 32, 40)),
            "num_attention_heads": kv_heads * draw.randint(1, 3),
            "num_key_value_heads": kv_heads,
            "head_dim": 32 if topology.name == "quantized" else draw.choice((4, 8, 16, 32)),
            "rope_traditional": draw.random() < 0.5,
            "tie_word_embeddings": draw.random() < 0.5,
        }
    if topology.name == "rotating":
        changes |= _sliding(draw)
    return HealthyRun(
        topology.name,
        tuple(changes.items()),
        seed=draw.getrandbits(32),
        # Recurrent and mixed families have steps in float32 of their own: one dtype is enough.
        dtype=draw.choice(("float32", "bfloat16", "float16")) if plain else "float32",
        prompt=draw.randint(1, 40),
        chunk=draw.randint(1, 40),
        steps=draw.randint(1, 12),
        more=draw.randint(1, 12),
        room=draw.randint(0, 300),
        codes=(draw.choice(TRACE), draw.choice(NUMERIC)),
    )


def _sliding(draw: random.Random) -> dict[str, Any]:
    """Return layers of both kinds, which mlx-lm's llama takes for granted, in any order, and a window."""
    kinds = ["sliding_attention", "full_attention"]
    layers = [*kinds, *draw.choices(kinds, k=draw.randint(0, 2))]
    draw.shuffle(layers)
    return {
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "sliding_window": draw.randint(2, 12),
    }


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
    exactness = "" if topology.family in ("", "llama") else _exactness(topology)
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
