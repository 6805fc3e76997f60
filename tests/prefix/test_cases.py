"""Ten reports of wrong prefix reuse from other projects, tried here; the name of each test says which."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from mlx_audit.models.build import build_tiny, resolve_arguments
from mlx_audit.prefix import EntryKind, PrefixCache, PrefixPromptCache, PrefixRefused, Reason
from mlx_audit.prefix.snapshot_compare import differences
from mlx_audit.prefix.store_files import MANIFEST
from prefix.caching import KEY, bytes_held, cache_of, cold_run, digests, feed_rows, linear
from prefix_models import _CONFIGURATIONS, Run, prefilled, subject, text
from tiny_models import module_of

T = text(100)
PICTURE = max(set(range(97)) - set(T))
FAMILIES = {"KV": "llama", "ROT": "gemma3_text", "HYB": "qwen3_next", "ARR": "mamba2", "LIST": "falcon_h1"}


def inserted(cache: PrefixCache, family: str, length: int, *ends: int) -> Run:
    """Insert a snapshot of the first tokens of T, read in chunks that end at these positions."""
    run = cold_run(family, T[:length], ends)
    cache.insert(T[:length], run.caches, position=length)
    return run


def chunked_pair() -> list[Any]:
    """Return caches of 20 tokens of which the chunked one has dropped the first 12."""
    caches = [ChunkedKVCache(8), KVCache()]
    for cache in caches:
        feed_rows(cache, 0, 20)
    caches[0].maybe_trim_front()
    assert caches[0].start_position == 12
    return caches


@pytest.mark.parametrize(("shared", "reason"), [(5, "partial-trim"), (15, "window-slid")])
def test_1_chunked_caches_are_not_trimmed_in_part(shared: int, reason: str) -> None:
    cache = PrefixPromptCache()
    cache.insert_cache(KEY, T[:20], chunked_pair())
    query = [*T[:shared], 96]
    assert cache.fetch_nearest_cache(KEY, query) == (None, query)
    assert cache.stats().refusals == {reason: 1}
    caches, rest = cache.fetch_nearest_cache(KEY, [*T[:20], 96])
    assert rest == [96]
    assert [one.offset for one in caches or ()] == [20, 20]


def test_1_trimmed_rows_of_a_concatenating_cache_do_not_come_back() -> None:
    cache, native = PrefixPromptCache(), ConcatenateKVCache()
    feed_rows(native, 0, 5)
    cache.insert_cache(KEY, T[:5], [native])
    caches, rest = cache.fetch_nearest_cache(KEY, [*T[:2], 96])
    assert caches is not None
    assert rest == [96]
    feed_rows(caches[0], 90, 1)
    assert caches[0].offset == caches[0].keys.shape[2] == 3
    assert caches[0].keys[0, 0, :, 0].tolist() == [0, 1, 90]


@pytest.mark.parametrize("name", ["HYB", "ARR", "KV"])
def test_3_a_state_of_24_tokens_is_not_stored_under_a_key_of_16(name: str) -> None:
    family = FAMILIES[name]
    cache, run = cache_of(family), prefilled(family, 24)
    said = {} if name != "ARR" else {"position": 24}
    with pytest.raises(PrefixRefused) as caught:
        cache.insert(T[:16], run.caches, **said)
    assert caught.value.reason is Reason.POSITION_MISMATCH
    assert (len(cache), cache.stats().not_inserted) == (0, {"position-mismatch": 1})
    if name != "ARR":
        drop_in = PrefixPromptCache()
        drop_in.insert_cache(KEY, T[:16], run.caches)
        assert (len(drop_in), drop_in.stats().not_inserted) == (0, {"position-mismatch": 1})


def test_3_nobody_vouches_for_a_stack_of_recurrent_layers_alone() -> None:
    cache, run = cache_of("mamba2"), prefilled("mamba2", 24)
    with pytest.raises(PrefixRefused, match="no layer of this stack counts"):
        cache.insert(T[:24], run.caches)
    assert cache.insert(T[:24], run.caches, position=24).entry is not None


@pytest.mark.parametrize("name", ["HYB", "ARR"])
def test_4_a_grid_of_16_is_taken_up_below_the_end_only(name: str) -> None:
    family, cache = FAMILIES[name], cache_of(FAMILIES[name])
    inserted(cache, family, 16)
    inserted(cache, family, 32, 16)
    planned = []
    for length in (15, 16, 17, 31, 32, 33):
        with cache.restore(T[:length]) as taken:
            prefix = taken.plan.prefix
            planned.append(prefix)
            run = Run(subject(family), taken.caches, prefix)
            wanted = cold_run(family, T[:prefix], (16,) if prefix == 32 else ())
            assert run.feed(taken.suffix) == wanted.feed(T[prefix:length])
            assert differences(run.caches, wanted.caches, length) == []
    assert planned == [0, 0, 16, 16, 16, 32]


@pytest.mark.parametrize(
    ("name", "planned"),
    [("KV", (29, 28, 9)), ("ROT", (29, 10, 9)), ("HYB", (29, 10, 0)), ("ARR", (29, 10, 0))],
)
def test_6_an_exact_hit_leaves_a_token(name: str, planned: tuple[int, ...]) -> None:
    family, cache = FAMILIES[name], cache_of(FAMILIES[name])
    inserted(cache, family, 10)
    inserted(cache, family, 29, 10)
    for length, prefix in zip((30, 29, 10), planned, strict=True):
        with cache.restore(T[:length]) as taken:
            assert taken.plan.prefix == prefix
            assert taken.suffix == T[prefix:length]
            run = Run(subject(family), taken.caches, prefix)
            wanted = cold_run(family, T[:prefix], (10,))
            assert run.feed(taken.suffix) == wanted.feed(T[prefix:length])
    assert cache.stats().refusals == ({"exact-replay-bypass": 1} if planned[-1] == 0 else {})


def test_8_a_prefix_of_one_token_is_found() -> None:
    cache = PrefixPromptCache()
    cache.insert_cache(KEY, [7], linear(1))
    caches, rest = cache.fetch_nearest_cache(KEY, [7, 8, 9])
    assert caches is not None
    assert (rest, caches[0].offset) == ([8, 9], 1)


def test_8_what_is_fetched_is_recent() -> None:
    cache = PrefixPromptCache(max_size=2)
    for key in ([1, 1], [2, 2]):
        cache.insert_cache(KEY, key, linear(2))
    assert cache.fetch_nearest_cache(KEY, [1, 1, 5])[0] is not None
    cache.insert_cache(KEY, [3, 3], linear(2))
    assert sorted(list(key) for key, _ in cache.index.items()) == [[1, 1], [3, 3]]


@pytest.mark.parametrize(("name", "left"), [("KV", 1), ("HYB", 2)])
def test_8_a_longer_entry_replaces_a_shorter_one_only_where_it_can_be_cut(name: str, left: int) -> None:
    family, cache, drop_in = FAMILIES[name], cache_of(FAMILIES[name]), PrefixPromptCache()
    for length in (4, 6):
        run = inserted(cache, family, length)
        drop_in.insert_cache(KEY, T[:length], run.caches)
    assert (len(cache), len(drop_in)) == (left, left)


@pytest.mark.parametrize("suffix", [1, 5])
def test_10_a_wrapped_ring_is_taken_up_at_its_end_and_never_cut(suffix: int) -> None:
    cache, run = cache_of("gemma3_text"), prefilled("gemma3_text", 40, 20)
    cache.insert(T[:60], run.caches)
    plan = cache.plan([*T[:56], 1, 2, 3])
    assert (plan.prefix, plan.reason, plan.where) == (0, Reason.WRAPPED_RING, "layer 0 (rotating)")
    with cache.restore(T[: 60 + suffix]) as taken:
        assert (taken.plan.prefix, taken.plan.reason) == (60, None)
        assert differences(taken.caches, run.caches, 60) == []
        warm = Run(run.model, taken.caches, 60)
        assert warm.feed(taken.suffix) == run.feed(T[60 : 60 + suffix])
        assert differences(warm.caches, run.caches, 60 + suffix) == []


def test_10_a_wrapped_ring_inside_a_list_is_seen() -> None:
    caches = [CacheList(RotatingKVCache(16), KVCache())]
    for part in caches[0].caches:
        feed_rows(part, 0, 40)
        for position in range(40, 60):
            feed_rows(part, position, 1)
    cache = PrefixPromptCache()
    cache.insert_cache(KEY, T[:60], caches)
    query = [*T[:56], 1, 2, 3]
    assert cache.fetch_nearest_cache(KEY, query) == (None, query)
    assert cache.stats().refusals == {"wrapped-ring": 1}
    restored, rest = cache.fetch_nearest_cache(KEY, T[:61])
    assert rest == T[60:61]
    assert differences(restored or [], caches, 60) == []


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_13_a_borrower_changes_nothing_for_the_owner(name: str) -> None:
    family = FAMILIES[name]
    cache = cache_of(family, exact=False)
    owner, borrower = T[:40], T[:24] + text(12, 5)
    first = cache.prefill(owner, stops=[24])
    before = digests(cache.index)
    other = cache.prefill(borrower)
    assert other.plan.prefix == 24
    run = Run(subject(family), other.caches, len(borrower))
    for token in text(10, 7):
        run.feed([token])
    after = digests(cache.index)
    assert {key: after[key] for key in before} == before
    again = cache.prefill(owner, stops=[24])
    assert again.plan.prefix == 39
    assert Run(subject(family), again.caches, 40).feed([3]) == Run(subject(family), first.caches, 40).feed(
        [3]
    )


def test_15_recurrent_states_keep_to_the_budget_and_prompts_outlive_answers() -> None:
    family = FAMILIES["HYB"]
    prompt, answer = prefilled(family, 20), prefilled(family, 20, 4)
    probe = cache_of(family)
    size = probe.insert(T[:24], answer.caches).entry
    assert size is not None
    budget = 20 * size.nbytes
    cache = cache_of(family, max_bytes=budget)
    for number in range(200):
        key = [number, *T[1:20]]
        for tokens, run, kind in (
            (key, prompt, EntryKind.PROMPT),
            (key + T[20:24], answer, EntryKind.OUTPUT),
        ):
            cache.insert([token % 97 + 97 * (token > 96) for token in tokens], run.caches, kind=kind)
            assert cache.nbytes <= budget
            if number % 20 == 0:
                assert cache.nbytes == bytes_held(cache.index)
    stats = cache.stats()
    assert cache.nbytes == bytes_held(cache.index)
    assert stats.nodes <= 2 * stats.entries + 1
    kinds = [entry.kind for _, entry in cache.index.items()]
    assert kinds.count(EntryKind.OUTPUT) <= 1
    assert kinds.count(EntryKind.PROMPT) >= 19
    cache.index.check()


def test_15_a_longer_recurrent_entry_leaves_the_shorter_one() -> None:
    cache = cache_of(FAMILIES["HYB"])
    inserted(cache, FAMILIES["HYB"], 20)
    inserted(cache, FAMILIES["HYB"], 40, 20)
    assert sorted(len(key) for key, _ in cache.index.items()) == [20, 40]
    assert cache.plan(T[:25]).prefix == 20


WORLDS: list[dict[str, Any]] = [
    {"adapter": "X"},
    {"salt": "X"},
    {"adapter": "X", "salt": ""},
    {},
    {"media": ("cat.png",)},
    {"media": ("dog.png",)},
]


def test_17_key_parts_of_different_kinds_are_different_worlds() -> None:
    placeholder = PICTURE
    tokens = [*T[:8], *[placeholder] * 8, *T[16:24]]
    cache = cache_of("llama", placeholders={placeholder})
    run = cold_run("llama", tokens)
    digests_ = {cache.fingerprint(world).digest for world in WORLDS}
    assert len(digests_) == len(WORLDS)
    plain = cold_run("llama", T[:24])
    for index, world in enumerate(WORLDS):
        query = tokens if "media" in world else T[:24]
        assert cache.plan([*query, 1], namespace=world).prefix == 0
        cache.insert(query, run.caches if "media" in world else plain.caches, namespace=world)
        hits = [
            cache.plan([*([*tokens, 1] if "media" in other else [*T[:24], 1])], namespace=other).prefix
            for other in WORLDS
        ]
        assert hits == [24] * (index + 1) + [0] * (len(WORLDS) - index - 1)


def test_17_a_picture_is_not_cut_and_not_shared_without_a_name() -> None:
    placeholder, world = PICTURE, {"media": ("cat.png",)}
    tokens = [*T[:8], *[placeholder] * 8, *T[16:24]]
    attention, hybrid = (cache_of(name, placeholders={placeholder}) for name in ("llama", "qwen3_next"))
    attention.insert(tokens, cold_run("llama", tokens).caches, namespace=world)
    query = [*tokens[:12], *T[50:60]]  # a picture of the same name in fewer tokens
    plan = attention.plan(query, namespace=world)
    assert (plan.prefix, plan.reason) == (8, Reason.MULTIMODAL)
    assert attention.plan([*tokens[:16], 1], namespace=world).prefix == 16
    longer = [*tokens[:12], *[placeholder] * 2, *T[50:60]]
    shorter = attention.plan(tokens[:13], namespace=world)  # the last token fed is one of the picture
    assert (shorter.prefix, shorter.reason) == (8, Reason.MULTIMODAL)
    hybrid.insert(tokens[:12], cold_run("qwen3_next", tokens[:12]).caches, namespace=world)
    refused = hybrid.plan(longer, namespace=world)
    assert (refused.prefix, refused.reason) == (0, Reason.MULTIMODAL)
    assert attention.plan(tokens).reason is Reason.MULTIMODAL
    with pytest.raises(PrefixRefused, match="names no media"):
        attention.insert(tokens, cold_run("llama", tokens).caches)
    with pytest.raises(PrefixRefused, match="placeholders cannot be read as text"):
        attention.prefill(tokens, namespace=world)


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from prefix.caching import cache_of
from prefix_models import Run, subject, text
T = text(100)
for family in ("llama", "gemma3_text", "qwen3_next", "falcon_h1"):
    cache = cache_of(family)
    assert cache.load(Path(sys.argv[2]) / family) == 1
    with cache.restore(T[:50]) as taken:
        assert taken.plan.prefix == 45, taken.plan
        print(family, Run(subject(family), taken.caches, 45).feed(taken.suffix).hex())
"""


def test_19_another_process_goes_on_from_the_file(tmp_path: Path) -> None:
    wanted = {}
    for name in ("KV", "ROT", "HYB", "LIST"):
        family = FAMILIES[name]
        run, cache = prefilled(family, 40, 5), cache_of(FAMILIES[name])
        cache.insert(T[:45], run.caches)
        cache.save(tmp_path / family)
        wanted[family] = run.feed(T[45:50]).hex()
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tests, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert dict(line.split() for line in done.stdout.splitlines()) == wanted


def gemma(**changes: Any) -> PrefixCache:
    """Return a cache over a model of the same weights as the shared one, but for what is changed."""
    module, seed = module_of("gemma3_text"), changes.pop("seed", 0)
    dtype = changes.pop("dtype", "float32")
    config = {"model_type": "gemma3_text", **_CONFIGURATIONS["gemma3_text"], **changes}
    return PrefixCache(build_tiny(module, resolve_arguments(module, config), seed=seed, dtype=dtype), 1 << 30)


def altered(old: bytes, new: bytes) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / MANIFEST
        text_ = path.read_bytes()
        assert old in text_
        path.write_bytes(text_.replace(old, new))

    return change


def cut_body(folder: Path) -> None:
    (body,) = folder.glob("*.safetensors")
    body.write_bytes(body.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "other", "reason", "names"),
    [
        (altered(b"prefix-store/1", b"prefix-store/2"), {}, "format-version", "prefix-store/2"),
        (altered(b"RotatingKVCache", b"RotatingKVCash"), {}, "damaged", "checksum"),
        (cut_body, {}, "damaged", "cut"),
        (None, {"seed": 1}, "other-fingerprint", "weights"),
        (None, {"dtype": "bfloat16"}, "other-fingerprint", "dtype"),
        (None, {"sliding_window": 8}, "other-fingerprint", "another model"),
        (None, {"bits": 8}, "other-fingerprint", "cache kind"),
    ],
)
def test_19_another_world_does_not_read_the_file(
    change: Callable[[Path], Any] | None, other: dict[str, Any], reason: str, names: str, tmp_path: Path
) -> None:
    cache = gemma()
    cache.prefill(T[:45])
    cache.save(tmp_path)
    if change is not None:
        change(tmp_path)
    bits = other.pop("bits", None)
    reader = gemma(**other) if bits is None else quantized(cache, bits)
    with pytest.raises(PrefixRefused, match=names) as caught:
        reader.load(tmp_path)
    assert caught.value.reason == reason
    assert (len(reader), reader.nbytes) == (0, 0)
    if change is None:
        assert gemma().load(tmp_path) == 1


def quantized(cache: PrefixCache, bits: int) -> PrefixCache:
    """Return a cache over the same model whose requests use quantized attention caches."""
    from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

    def make(model: Any) -> list[Any]:
        return [
            QuantizedKVCache(32, bits) if isinstance(one, KVCache) else one
            for one in make_prompt_cache(model)
        ]

    return PrefixCache(cache.model, 1 << 30, make_cache=make)


def test_19_a_file_that_is_damaged_after_it_was_opened_is_refused_and_leaves(tmp_path: Path) -> None:
    cache = gemma()
    wanted = cache.prefill(T[:45])
    cache.save(tmp_path)
    reader = gemma()
    assert reader.load(tmp_path) == 1
    (body,) = tmp_path.glob("*.safetensors")
    body.write_bytes(bytes(body.stat().st_size))
    with reader.restore(T[:46]) as taken:
        assert (taken.plan.prefix, taken.plan.reason) == (0, Reason.DAMAGED)
        assert taken.suffix == T[:46]
    assert (len(reader), reader.stats().leases) == (0, 0)
    assert mx.array_equal(reader.prefill(T[:45]).logits, wanted.logits)
