"""TOP001-004: is the declared topology the one that the model has, and the one that its configuration names?"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from audited import all_results, green, healthy, mutated, new_subject, only, red
from mlx_audit.caches import cache_class
from mlx_audit.evidence.verdict import decide
from mlx_audit.manifests import CacheSpec
from mlx_audit.manifests.kinds import KINDS
from mlx_audit.models.layer_types import LAYER_TYPES, disagreement
from tiny_models import FAMILIES, config_of

LINEAR = CacheSpec("linear")
ROTATING = CacheSpec("rotating", (("window", 8), ("keep", 0)))
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}


def _own_cache(folder: Path, body: str) -> Any:
    return mutated(folder, ("                else KVCache()\n", f"                else {body}\n"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", ["TOP001", "TOP002", "TOP003"])
def test_healthy(code: str, family: str) -> None:
    green(code, healthy(family))


def test_alternating_layers_as_declared() -> None:
    subject = new_subject(config=config_of("llama", **SLIDING), expected=[ROTATING, LINEAR] * 2)
    figures = green("TOP001", subject).figures
    assert figures["kinds"] == {"rotating": 2, "linear": 2}
    assert figures["layers"] == [["rotating(window=8, keep=0)", 1], ["linear", 1]] * 2


def test_equal_layers_in_a_row_are_one_entry_of_the_figures() -> None:
    config = config_of("llama", layer_types=["sliding_attention", *["full_attention"] * 3], sliding_window=8)
    subject = new_subject(config=config, expected=[ROTATING, *[LINEAR] * 3])
    live = [["rotating(window=8, keep=0)", 1], ["linear", 3]]
    assert green("TOP001", subject).figures["layers"] == live
    wrong = new_subject(config=config, expected=[LINEAR] * 4)
    assert red("TOP001", wrong).figures["layers"] == live, "what is there, not what is declared"


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        ([LINEAR] * 4, "cache 0: make_cache() gives rotating(window=8, keep=0), declared is linear"),
        ([ROTATING, LINEAR] * 2 + [LINEAR], "make_cache() gives 4 entries, declared are 5"),
        ([LINEAR, ROTATING] * 2, "cache 0: make_cache() gives rotating"),
        ([CacheSpec("rotating", (("window", 9), ("keep", 0))), LINEAR] * 2, "declared is rotating(window=9"),
        ([CacheSpec("rotating", (("window", 8), ("keep", 4))), LINEAR] * 2, "keep=4"),
    ],
)
def test_another_topology_than_declared(expected: list[CacheSpec], reason: str) -> None:
    subject = new_subject(config=config_of("llama", **SLIDING), expected=expected)
    assert reason in red("TOP001", subject).reason


def test_a_layer_kind_that_the_tiny_model_lacks() -> None:
    subject = new_subject(reachable={0: "someone--Big-Model", 1: "tiny"}, exercised={1})
    result = red("TOP002", subject)
    assert result.reason == "rule 0 (reached by someone--Big-Model) is not reached by `tiny`"
    assert result.where == "topology.layers[0]"


OWN = "type('LayerCache', (KVCache,), {})()"


@pytest.mark.parametrize(
    ("made", "place", "reason"),
    [
        (OWN, "layer 0", "LayerCache is not a cache class of mlx-lm"),
        (
            f"__import__('mlx_lm').models.cache.CacheList(KVCache(), {OWN})",
            "layer 0, part 1",
            "LayerCache is not",
        ),
        (
            f"(CL := __import__('mlx_lm').models.cache.CacheList)(KVCache(), CL(KVCache(), {OWN}))",
            "layer 0, part 1, part 1",
            "LayerCache is not",
        ),
        (
            "__import__('mlx_lm').models.cache.ConcatenateKVCache()",
            "layer 0",
            "mlx_lm.models.cache.ConcatenateKVCache has no fixed-capacity form",
        ),
        (
            "__import__('mlx_lm').models.cache.BatchKVCache([0])",
            "layer 0",
            "mlx_lm.models.cache.BatchKVCache has no fixed-capacity form",
        ),
    ],
)
def test_an_unknown_cache_class_is_undecided(tmp_path: Path, made: str, place: str, reason: str) -> None:
    results = all_results(new_subject(module=_own_cache(tmp_path, made)))
    assert results["TOP003"].status == "not-run"
    assert results["TOP003"].reason.startswith(f"{place}: ")
    assert reason in results["TOP003"].reason
    assert results["TOP001"].reason == "needs TOP003, which was not run"
    verdict = decide(list(results.values()))
    assert (verdict.name, verdict.reason[:22]) == ("undecided", "TOP003 was not run: la")


def test_where_entries_are_not_one_a_layer_their_place_is_named(tmp_path: Path) -> None:
    change = ("        return [\n            (\n", "        return [object()] + [\n            (\n")
    module = mutated(tmp_path, change)
    assert only("TOP003", new_subject(module=module)).reason.startswith("cache 0: builtins.object is not")


def test_composites_are_compared_part_by_part(tmp_path: Path) -> None:
    module = _own_cache(tmp_path, "__import__('mlx_lm').models.cache.CacheList(KVCache(), KVCache())")
    both = CacheSpec("composite", (), (LINEAR, LINEAR))
    green("TOP001", new_subject(module=module, expected=[both] * 4))
    one = CacheSpec("composite", (), (LINEAR, ROTATING))
    result = red("TOP001", new_subject(module=module, expected=[both, one, both, both]))
    assert result.reason == (
        "cache 1: make_cache() gives composite(linear, linear), "
        "declared is composite(linear, rotating(window=8, keep=0))"
    )


def test_every_kind_has_a_fixed_capacity_form() -> None:
    assert all(cache_class(kind) is not None for kind in KINDS if kind != "none")


def test_without_a_manifest_or_layer_types_they_say_nothing() -> None:
    subject = new_subject(expected=None)
    assert [only(code, subject).status for code in ("TOP001", "TOP002", "TOP004")] == ["not-applicable"] * 3


GPT = {**config_of("llama"), **SLIDING}
FULL, SLIDES = "full_attention", "sliding_attention"


def _stated(layer_types: Any, **more: Any) -> Any:
    """Return a llama with sliding layers 0 and 2, whose published configuration says something else of them."""
    subject = new_subject(config=GPT, expected=[ROTATING, LINEAR] * 2)
    assert subject.lazy_model is not None
    subject.config = {**GPT, "layer_types": layer_types, **more}
    return subject


def test_layer_types_agree() -> None:
    figures = green("TOP004", _stated([SLIDES, FULL] * 2)).figures
    assert figures["layers"] == {
        "sliding_attention on rotating(window=8, keep=0)": 2,
        "full_attention on linear": 2,
    }
    assert (figures["without_cache"], figures["keep_more_than_needed"]) == (0, 0)


def test_a_mistake_that_manifest_and_model_share_is_seen_from_outside(tmp_path: Path) -> None:
    module = mutated(tmp_path, ("if layer.use_sliding\n", "if not layer.use_sliding\n"))
    subject = new_subject(module=module, config=GPT, expected=[LINEAR, ROTATING] * 2)
    green("TOP001", subject)
    assert "layer 1 is full_attention: it keeps every token" in red("TOP004", subject).reason


@pytest.mark.parametrize(
    ("layer_types", "more", "reason"),
    [
        (
            [FULL] * 4,
            {},
            "layer 0 is full_attention: it keeps every token; its cache is rotating(window=8, keep=0)",
        ),
        ([SLIDES, FULL] * 2, {"sliding_window": 16}, "it keeps rotating(window=16, keep=0), or every token"),
        ([SLIDES, "mamba"] * 2, {}, "layer 1 is mamba: it keeps a state, in arrays; its cache is linear"),
        ([SLIDES, "hybrid"] * 2, {}, "layer 1 is hybrid: it keeps a state"),
        (
            ["chunked_attention", FULL] * 2,
            {"attention_chunk_size": 8},
            "it keeps chunked(chunk=8), or every token",
        ),
        ([SLIDES, FULL], {}, "layer_types has 2 layers with a cache, of 2; make_cache() gives 4"),
        (
            [SLIDES, FULL, "moe", SLIDES],
            {},
            "layer_types has 3 layers with a cache, of 4; make_cache() gives 4",
        ),
        ([SLIDES, FULL] * 2, {"num_kv_shared_layers": 1}, "layer_types has 3 layers with a cache, of 4"),
    ],
)
def test_layer_types_disagree(layer_types: list[str], more: dict[str, Any], reason: str) -> None:
    assert reason in red("TOP004", _stated(layer_types, **more)).reason


@pytest.mark.parametrize(
    ("layer_types", "more", "reason"),
    [
        ([SLIDES, "conv_mixer"] * 2, {}, "layer 1: 'conv_mixer' is not a layer type that is known here"),
        ([SLIDES, ["full_attention"]] * 2, {}, "is not a layer type"),
        ("full_attention", {}, "layer_types is no list but str"),
        ([SLIDES, FULL] * 2, {"sliding_window": None}, "no number as sliding_window, but None"),
        ([SLIDES, FULL] * 2, {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5, of 4 layers"),
    ],
)
def test_what_layer_types_leave_open_is_undecided(
    layer_types: Any, more: dict[str, Any], reason: str
) -> None:
    result = only("TOP004", _stated(layer_types, **more))
    assert result.status == "not-run"
    assert reason in result.reason


def test_layers_that_read_the_cache_of_others_have_none() -> None:
    subject = _stated([SLIDES, FULL] * 2 + ["mlp", "moe", SLIDES], num_kv_shared_layers=1)
    assert green("TOP004", subject).figures["without_cache"] == 3


def test_nested_layer_types_and_wider_caches() -> None:
    subject = new_subject()
    assert subject.lazy_model is not None
    subject.config = {"text_config": {"layer_types": [SLIDES, FULL] * 2}, "layer_types": ["x"]}
    assert green("TOP004", subject).figures["keep_more_than_needed"] == 2


def test_entries_before_the_layers_are_left_out() -> None:
    subject = _stated([FULL, SLIDES, FULL])
    subject.expected = [CacheSpec("rotating", ROTATING.parameters, rule=-1), *[LINEAR, ROTATING, LINEAR]]
    green("TOP004", subject)


@pytest.mark.parametrize(
    ("layer_type", "spec", "agrees"),
    [
        (FULL, CacheSpec("quantized", (("bits", 8), ("group_size", 64))), True),
        (FULL, CacheSpec("composite", (), (CacheSpec("arrays", (("slots", 2),)), LINEAR)), True),
        (FULL, CacheSpec("composite", (), (LINEAR, ROTATING)), False),
        (FULL, CacheSpec("arrays", (("slots", 2),)), False),
        ("attention", CacheSpec("chunked", (("chunk", 8),)), False),
        (SLIDES, CacheSpec("composite", (), (CacheSpec("arrays", (("slots", 2),)), ROTATING)), True),
        (SLIDES, CacheSpec("rotating", (("window", 8), ("keep", 4))), False),
        (SLIDES, CacheSpec("chunked", (("chunk", 8),)), False),
        ("chunked_attention", CacheSpec("chunked", (("chunk", 16),)), True),
        ("chunked_attention", ROTATING, False),
        ("conv", CacheSpec("arrays", (("slots", 1),)), True),
        ("linear_attention", CacheSpec("composite", (), (CacheSpec("arrays", (("slots", 1),)),)), True),
        (
            "linear_attention",
            CacheSpec("composite", (), (CacheSpec("arrays", (("slots", 1),)), LINEAR)),
            False,
        ),
        ("hybrid", CacheSpec("composite", (), (CacheSpec("arrays", (("slots", 2),)), LINEAR)), True),
        ("hybrid", CacheSpec("composite", (), (CacheSpec("arrays", (("slots", 2),)), ROTATING)), False),
        (
            "hybrid_sliding",
            CacheSpec("composite", (), (CacheSpec("arrays", (("slots", 2),)), ROTATING)),
            True,
        ),
        ("indexed_attention", CacheSpec("composite", (), (LINEAR, LINEAR)), True),
    ],
)
def test_what_serves_which_layer_type(layer_type: str, spec: CacheSpec, agrees: bool) -> None:
    config = {"sliding_window": 8, "attention_chunk_size": 16}
    assert (disagreement(layer_type, spec, config) is None) is agrees


OWN = ("moe", "mlp", "sparse_attention")
"""Types without a layer in transformers' cache, and mlx-lm's own."""


def test_the_table_is_that_of_transformers() -> None:
    """Read from the installed source, without running it; a name that changed its class must be looked at again."""
    folder = Path(find_spec("transformers").submodule_search_locations[0])  # type: ignore[union-attr, index]
    static = _dictionary(folder / "cache_utils.py", "STATIC_LAYER_TYPE_MAPPING")
    old = _dictionary(folder / "configuration_utils.py", "_LEGACY_LAYER_TYPE_REMAP")
    classes = {name: static[old.get(name, name)] for name in LAYER_TYPES if name not in OWN}
    needs: dict[str, set[Any]] = {}
    for name, cls in classes.items():
        needs.setdefault(cls, set()).add(LAYER_TYPES[name].state)
    assert {cls for cls, state in needs.items() if state == {True}} == {
        "LinearAttentionLayer",
        "LinearAttentionAndStaticFullAttentionLayer",
        "LinearAttentionAndStaticSlidingWindowAttentionLayer",
    }
    assert all(len(state) == 1 for state in needs.values())
    assert all(
        ("Sliding" in cls) is (LAYER_TYPES[n].tokens in ("window", "chunk")) for n, cls in classes.items()
    )


def _dictionary(file: Path, name: str) -> dict[str, str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.unparse(value).strip("'\"") for key, value in pairs if key}
    raise AssertionError(f"{file} has no {name} any more")
