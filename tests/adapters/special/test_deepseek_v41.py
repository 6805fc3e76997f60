"""deepseek_v41, whose cache class is its own: the patched model, and its caches of fixed capacity."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import libcst as cst
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from audited import green, new_subject, red
from command import mlx_audit
from mlx_audit.adapters import adapter_for
from mlx_audit.adapters.patching import patch_source
from mlx_audit.adapters.patching.codemods.deepseek_v41 import DeepseekV41Caches
from mlx_audit.adapters.special.deepseek_v41 import FixedCapacityLayerCache
from mlx_audit.adapters.special.pooled import FixedCapacityPooledCache, PooledKVCache
from mlx_audit.checks.runs import Eager
from mlx_audit.checks.subject import Subject
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import CapacityExceeded, NotCompileCapable, ShapeMismatch
from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.models.modules import import_file, import_model
from tiny_models import tokens

MODULE = "mlx_lm.models.deepseek_v41"
SOURCE = Path(import_model(MODULE).__file__ or "")
WINDOW = 5
TINY: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "compress_ratios": [0, 1, 3, 3],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "max_position_embeddings": 1000,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "first": {},
    "two of four": {"compress_ratios": [4, 4, 2, 2], "kv_source_layer_ids": [0, 2]},
    "one": {"compress_ratios": [1, 1, 1, 1]},
    "seven, no index keys": {
        "compress_ratios": [0, 7, 7, 7],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1],
        "candidate_source_layer_id": -1,
    },
    "window alone": {"compress_ratios": [], "kv_source_layer_ids": [], "index_source_layer_ids": []},
}


@functools.cache
def patched() -> ModuleType:
    """Return the patched family, loaded beside the installed one."""
    with tempfile.TemporaryDirectory() as folder:
        return import_file(written(Path(folder)))


def written(folder: Path) -> Path:
    """Write the patched source and return its file."""
    path = folder / "deepseek_v41.py"
    path.write_text(mended(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def mended(source: str) -> str:
    return DeepseekV41Caches().apply(cst.parse_module(source)).code


@functools.cache
def model_of(name: str = "first") -> nn.Module:
    """Return a tiny model of the patched family."""
    return built(patched(), name)


def built(module: ModuleType, name: str) -> nn.Module:
    arguments = resolve_arguments(module, {**TINY, **CONFIGURATIONS[name]})
    return build_tiny(module, arguments, seed=0, dtype="float32")


def subject(module: ModuleType | None = None) -> Subject:
    return new_subject("deepseek_v41", module or patched(), config=TINY, expected=None, exactness="")


def session_of(name: str, capacity: int, **options: Any) -> CompiledDecodeSession:
    return CompiledDecodeSession(model_of(name), capacity, evidence="ignore", **options)


def require_equal(session: CompiledDecodeSession, eager: Eager, got: mx.array, want: mx.array) -> None:
    """Compare logits, and what each `LayerCache` holds by its own words; sums are taken in another order."""
    assert mx.allclose(got, want, rtol=0, atol=2e-5).item()
    for cache, native in zip(session.caches, eager.cache, strict=True):
        for own, other in zip(cache.to_native().state, native.state, strict=True):
            assert (own is None) == (other is None)
            if own is not None:
                assert (own.shape, own.dtype) == (other.shape, other.dtype)
                assert mx.allclose(own, other, rtol=0, atol=2e-5).item()


def test_patch_is_complete_and_idempotent() -> None:
    source = patch_source(SOURCE, MODULE)
    assert source.applied == ("deepseek_v41_caches",)
    assert source.after == mended(source.before)
    assert mended(source.after) == source.after


@pytest.mark.parametrize(
    "piece",
    [
        "self.window_size = window_size",
        "kv.shape[1] % self.ratio",
        "cache.index_k = _append(cache.index_k, k)",
    ],
)
def test_source_that_is_not_understood_is_left_alone(piece: str) -> None:
    source = SOURCE.read_text(encoding="utf-8").replace(piece, f"{piece} + 0")
    assert mended(source) == source


def test_windows_line_ends_are_kept() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    assert mended(source.replace("\n", "\r\n")) == mended(source).replace("\n", "\r\n")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_eager_decoding_stays_bit_equal(name: str) -> None:
    before, after = Eager(built(import_model(MODULE), name)), Eager(model_of(name))
    at, text = 0, tokens(64)
    for length in (2, 1, 1, 5, 1, 12, 1, 3, 1, 1, 17):
        piece = text[at : at + length]
        assert mx.array_equal(after.feed(piece), before.feed(piece)).item()
        at += length
    for own, other in zip(after.cache, before.cache, strict=True):
        pairs = zip(own.state, other.state, strict=True)
        assert all((a is None and b is None) or mx.array_equal(a, b).item() for a, b in pairs)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("prompt", [7, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 3, 12))])
def test_each_step_equals_eager_decoding(name: str, prompt: int) -> None:
    """Groups are closed and windows turn, in single steps and in chunks, up to the last slot."""
    lengths = [*[1] * 8, 4, 1, 1, 7, 1, 1]
    text = tokens(prompt + sum(lengths))
    session, eager = session_of(name, len(text)), Eager(model_of(name))
    require_equal(session, eager, session.prefill([text[:prompt]]), eager.feed(text[:prompt]))
    at = prompt
    for length in lengths:
        piece = text[at : at + length]
        got = session.step(piece) if length == 1 else session.extend([piece])
        require_equal(session, eager, got, eager.feed(piece))
        at += length
    assert session.remaining == 0
    assert session.trace_count == 1


def test_every_length_of_a_prompt_is_handed_over_and_back() -> None:
    text = tokens(24)
    form = adapter_for(model_of(), evidence="ignore").new_fixed_capacity_cache(24)
    for length in range(1, 24):
        eager = Eager(model_of())
        eager.feed(text[:length])
        handed = [cache.refilled(own) for cache, own in zip(form, eager.cache, strict=True)]
        for cache, native in zip(handed, eager.cache, strict=True):
            assert cache.count() == length
            for own, other in zip(cache.to_native().state, native.state, strict=True):
                assert (own is None) == (other is None)
                assert own is None or mx.array_equal(own, other).item()


def test_rungs_reach_all_entries() -> None:
    """A step that attends to a part of the slots still sees every closed group."""
    text = tokens(260)
    session, eager = session_of("first", 600), Eager(model_of())
    require_equal(session, eager, session.prefill([text[:253]]), eager.feed(text[:253]))
    for token in text[253:]:
        require_equal(session, eager, session.step([token]), eager.feed([token]))
    assert session.trace_count == 2


def test_rows_of_equal_length_are_decoded_side_by_side() -> None:
    rows = [tokens(14, seed) for seed in (1, 2, 3)]
    session = session_of("first", 14, batch_size=3)
    natives: list[Any] = make_prompt_cache(model_of())
    want = model_of()(mx.array([row[:8] for row in rows]), cache=natives)[:, -1]
    got = session.prefill([row[:8] for row in rows])
    for at in range(8, 14):
        assert mx.allclose(got, want, rtol=0, atol=2e-5).item()
        want = model_of()(mx.array([row[at : at + 1] for row in rows]), cache=natives)[:, -1]
        got = session.step([row[at] for row in rows])
    assert mx.allclose(got, want, rtol=0, atol=2e-5).item()


def test_rows_of_different_length_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="LayerCache has no merge"):
        session_of("first", 8, batch_size=2).prefill([[1, 2], [3, 4]], lengths=[1, 2])


def test_pipeline_is_refused() -> None:
    model = built(patched(), "first")
    model.model.pipeline_size = 2
    with pytest.raises(NotCompileCapable, match="2 stages"):
        CompiledDecodeSession(model, 8, evidence="ignore")


def test_copies_are_independent() -> None:
    text = tokens(12)
    session = session_of("first", 16)
    session.prefill([text])
    copy = session.copy()
    for token in (1, 2, 3):
        copy.step([token])
    for branch, more in ((session, []), (copy, [1, 2, 3])):
        eager = Eager(model_of())
        eager.feed(text)
        for token in more:
            eager.feed([token])
        require_equal(branch, eager, branch.step([5]), eager.feed([5]))


def test_trim_is_refused_where_rows_are_pooled() -> None:
    session = session_of("first", 12)
    session.prefill([tokens(4)])
    session.step([1])
    before = [mx.array(array) for arrays in session.state for array in arrays]
    assert session.trim(1) == 0
    after = [array for arrays in session.state for array in arrays]
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, after, strict=True))


def test_trim_is_exact_without_groups_until_the_window_turns() -> None:
    session, eager = session_of("window alone", 12), Eager(model_of("window alone"))
    session.prefill([[1, 2]])
    session.step([3])
    assert session.trim(1) == 1
    eager.feed([1, 2])
    require_equal(session, eager, session.step([4]), eager.feed([4]))
    session.extend([[5, 6, 7]])
    assert session.trim(1) == 0


def test_saved_session_goes_on(tmp_path: Path) -> None:
    text, path = tokens(16), tmp_path / "session.safetensors"
    session = session_of("first", 16)
    session.prefill([text[:10]])
    session.save(path)
    loaded = CompiledDecodeSession.load(path, model_of(), evidence="ignore")
    for token in text[10:]:
        assert mx.array_equal(loaded.step([token]), session.step([token])).item()


def test_one_token_too_many_is_refused() -> None:
    session = session_of("first", 7)
    session.prefill([tokens(6)])
    with pytest.raises(CapacityExceeded):
        session.extend([[1, 2]])
    session.step([1])
    with pytest.raises(CapacityExceeded):
        session.step([1])
    (cache, *_) = session.caches
    with pytest.raises(CapacityExceeded):
        cache.update_window(mx.zeros((1, 1, 32)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("ratio", [1, 3, 4])
@pytest.mark.parametrize("block", [1, 2])
def test_pooled_cache_keeps_the_last_token_of_each_group(ratio: int, block: int) -> None:
    native = PooledKVCache(ratio, block)
    numbers = mx.reshape(mx.arange(1.0, 31.0), (1, 1, 30, 1))
    native.update_and_fetch(numbers[:, :, :5], -numbers[:, :, :5])
    cache = FixedCapacityPooledCache.adopt(native, 30)
    assert cache.slots % block == 0
    at = 5
    for length in (1, 1, 4, 1, 6, 2, 1, 9):
        mask = cache.make_mask(length)[0, 0].tolist()
        keys, values = cache.update_and_fetch(
            numbers[:, :, at : at + length], -numbers[:, :, at : at + length]
        )
        native.update_and_fetch(numbers[:, :, at : at + length], -numbers[:, :, at : at + length])
        for query in range(length):
            closed = (at + query + 1) // ratio
            assert mask[query] == [slot < closed for slot in range(cache.slots)]
            assert keys[0, 0, :closed, 0].tolist() == [ratio * (group + 1) for group in range(closed)]
        assert mx.array_equal(values, -keys).item()
        at += length
        assert mx.array_equal(cache.to_native().keys, native.keys).item()
        assert cache.count() == native.offset == at
    with pytest.raises(CapacityExceeded):
        cache.update_and_fetch(numbers[:, :, :1], numbers[:, :, :1])


# Faults: each must turn a check red.


def _window_too_narrow(patch: pytest.MonkeyPatch) -> None:
    own = FixedCapacityLayerCache.window_indices

    def narrow(self: FixedCapacityLayerCache, length: int) -> mx.array:
        indices = own(self, length)
        return mx.where(mx.arange(indices.shape[-1]) == 0, -1, indices)

    patch.setattr(FixedCapacityLayerCache, "window_indices", narrow)


def _group_late(patch: pytest.MonkeyPatch) -> None:
    own = FixedCapacityPooledCache.group.fget
    patch.setattr(FixedCapacityPooledCache, "group", property(lambda self: own(self) + 1))


def _slot_frozen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FixedCapacityPooledCache, "_slot_of", lambda self, time: mx.zeros((1,), mx.int32))


def _slot_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FixedCapacityPooledCache, "_slot_of", lambda self, time: (time + 1) // self.ratio)


def _index_keys_dropped(patch: pytest.MonkeyPatch) -> None:
    own = FixedCapacityLayerCache.update_compressed
    patch.setattr(
        FixedCapacityLayerCache,
        "update_compressed",
        lambda self, kv, k: own(self, kv, None if k is None else mx.zeros_like(k)),
    )


def _pending_kept_too_long(patch: pytest.MonkeyPatch) -> None:
    own = FixedCapacityLayerCache.update_pending

    def late(self: FixedCapacityLayerCache, kv: mx.array, *others: Any) -> Any:
        rows = list(self.caches[2].state)
        found = own(self, kv, *others)
        self.caches[2][0] = rows[0]  # type: ignore[index]
        return found

    patch.setattr(FixedCapacityLayerCache, "update_pending", late)


def _hand_over_without_pending(patch: pytest.MonkeyPatch) -> None:
    own = FixedCapacityLayerCache.to_native

    def without(self: FixedCapacityLayerCache) -> Any:
        native = own(self)
        if native.pending_kv is not None:
            native.pending_kv = mx.zeros_like(native.pending_kv)
        return native

    patch.setattr(FixedCapacityLayerCache, "to_native", without)


def _entries_shown_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FixedCapacityPooledCache, "_key_times", lambda self, N: mx.arange(self._rung) * self.ratio)


def _trim_of_pooled_rows(patch: pytest.MonkeyPatch) -> None:
    def trim(self: FixedCapacityLayerCache, n: int) -> int:
        for cache in self.caches[:2]:
            cache.trim(n)
        return n

    patch.setattr(FixedCapacityLayerCache, "trim", trim)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (_window_too_narrow, "STA001"),
    (_group_late, "STA001"),
    (_slot_frozen, "TRC004"),
    (_slot_early, "STA001"),
    (_index_keys_dropped, "STA001"),
    (_pending_kept_too_long, "STA001"),
    (_hand_over_without_pending, "STA001"),
    (_entries_shown_early, "MSK001"),
    (_trim_of_pooled_rows, "STA003"),
]


@pytest.mark.parametrize(("plant", "code"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    red(code, subject())


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        ("TRC001", "start_pos = cache[0].offset", "start_pos = int(cache[0].offset)"),
        (
            "TRC005",
            "mask = mx.concatenate(indices, axis=-1) >= 0",
            "mask = mx.ones(mx.concatenate(indices, axis=-1).shape, mx.bool_)",
        ),
        ("TRC005", "scores = mx.where(visible[None], scores, -mx.inf)", "pass"),
    ],
)
def test_mistake_in_the_model_is_found(tmp_path: Path, code: str, old: str, new: str) -> None:
    path = written(tmp_path)
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1
    path.write_text(source.replace(old, new), encoding="utf-8")
    red(code, subject(import_file(path)))


@pytest.mark.parametrize("code", ["TRC001", "TRC005", "STA001", "STA003"])
def test_patched_family_passes(code: str) -> None:
    green(code, subject())


@pytest.mark.nightly
def test_whole_audit_finds_it_capable(tmp_path: Path) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY), encoding="utf-8")
    finished = mlx_audit("run", written(tmp_path), "--config", config)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "capable" in finished.stdout
