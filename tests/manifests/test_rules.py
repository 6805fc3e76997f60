"""Rules found from what was seen: what they explain, and that a coincidence does not survive."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_audit.manifests import CacheSpec
from mlx_audit.manifests.observations import Observation, Unexplained, shape
from mlx_audit.manifests.rules import generalise, written_out

FULL, STATE, NONE = CacheSpec("linear"), CacheSpec("arrays", (("slots", 2),)), CacheSpec("none")


def ring(window: int) -> CacheSpec:
    return CacheSpec("rotating", (("window", window), ("keep", 0)))


def seen(layers: list[CacheSpec], before: tuple[CacheSpec, ...] = (), **names: Any) -> Observation:
    entries = [*before, *(spec for spec in layers if spec.kind != "none")]
    return Observation(
        "it", {"num_hidden_layers": len(layers), **names}, entries, len(layers), layers, before
    )


def test_one_kind_needs_no_condition() -> None:
    rules = generalise([seen([FULL] * 4), seen([FULL] * 32)])
    assert (rules.count, rules.layers) == ("num_hidden_layers", [{"cache": "linear"}])


def test_a_list_of_types_and_the_name_of_the_window() -> None:
    types = ["slide", "full", "slide"]
    one = seen([ring(128), FULL, ring(128)], layer_types=types, sliding_window=128, head_dim=128)
    two = seen([FULL, ring(8), FULL], layer_types=["full", "slide", "full"], sliding_window=8, head_dim=4)
    rules = generalise([one, two])
    assert rules.layers in (
        [
            {"when": "layer_types[i] == 'slide'", "cache": "rotating", "window": "sliding_window", "keep": 0},
            {"cache": "linear"},
        ],
        [
            {"when": "layer_types[i] == 'full'", "cache": "linear"},
            {"cache": "rotating", "window": "sliding_window", "keep": 0},
        ],
    )


def every(period: int, count: int, **names: Any) -> Observation:
    layers = [FULL if (at + 1) % period == 0 else STATE for at in range(count)]
    return seen(layers, **names)


def test_a_period_is_named_where_it_moves_with_an_argument() -> None:
    rules = generalise([every(4, 12, interval=4, heads=4), every(3, 9, interval=3, heads=4)])
    assert rules.layers[0]["when"] == "(i + 1) % interval == 0"


def test_a_number_that_only_happens_to_agree_is_not_taken() -> None:
    """`heads` is 4 in the configuration, as the period in the code is; another observation tells them apart."""
    alone = generalise([every(4, 12, heads=4)])
    assert "heads" in alone.layers[0]["when"]
    both = generalise([every(4, 12, heads=4), every(4, 9, heads=3)])
    assert both.layers[0]["when"] == "(i + 1) % 4 == 0"


def test_two_conditions_are_joined_only_where_one_does_not_do() -> None:
    def grouped(group: int, count: int) -> Observation:
        layers = [
            FULL if (at + 1) % group == 0 or at >= count // group * group else STATE for at in range(count)
        ]
        return seen(layers, group=group)

    rules = generalise([grouped(3, 11), grouped(4, 10), grouped(2, 7), grouped(4, 8)])
    assert rules.layers[0]["when"] == (
        "(i + 1) % group == 0 or i >= num_hidden_layers - num_hidden_layers % group"
    )


def test_layers_without_a_cache_are_taken_out_first() -> None:
    def shared(number: int, types: str) -> Observation:
        layers = [FULL if kind == "F" else ring(8) for kind in types]
        return seen(
            [*layers[: len(layers) - number], *[NONE] * number], types=list(types), shared=number, window=8
        )

    rules = generalise([shared(2, "SFSFSF"), shared(3, "FSSFSFF"), shared(1, "SSFFS")])
    assert rules.layers[0] == {"when": "i >= num_hidden_layers - shared", "cache": "none"}
    assert "types[i]" in rules.layers[1]["when"]


def test_a_cache_before_the_layers() -> None:
    one = CacheSpec("arrays", (("slots", 1),))
    rules = generalise([seen([FULL] * 3, (one,)), seen([FULL] * 5, (one,))])
    assert rules.before == [{"cache": "arrays", "slots": 1}]


def test_parts_of_composites_are_named_too() -> None:
    def pair(window: int) -> CacheSpec:
        return CacheSpec("composite", (), (STATE, ring(window)))

    rules = generalise([seen([pair(64)] * 3, span=64), seen([pair(8)] * 2, span=8)])
    parts = [
        {"cache": "arrays", "slots": 2},
        {"cache": "rotating", "window": "span", "keep": 0},
    ]
    assert rules.layers == [{"cache": "composite", "of": parts}]


def test_what_no_argument_explains_is_refused() -> None:
    odd = [FULL, FULL, STATE, FULL, STATE, STATE, FULL, STATE, FULL, FULL, FULL]
    with pytest.raises(Unexplained, match="no rule tells"):
        generalise([seen(odd), seen(odd[::-1] + [STATE])])
    with pytest.raises(Unexplained, match="number of layers"):
        generalise([Observation("it", {"num_hidden_layers": 3}, [FULL] * 7, 7, [FULL] * 7)])
    with pytest.raises(Unexplained, match="gives the window"):
        generalise([seen([ring(9)] * 2), seen([ring(7)] * 3)])


def test_layers_written_out_are_told_apart_by_their_number() -> None:
    odd = [FULL, FULL, STATE, FULL, STATE, STATE]
    rules = written_out([seen(odd), seen(odd[1:4])])
    assert rules.layers == [
        {"when": "num_hidden_layers == 6 and i in [2, 4, 5]", "cache": "arrays", "slots": 2},
        {"when": "num_hidden_layers == 3 and i in [1]", "cache": "arrays", "slots": 2},
        {"cache": "linear"},
    ]
    with pytest.raises(Unexplained):
        written_out([seen(odd), seen(odd[::-1])])


def test_long_lists_are_cut_to_what_an_expression_may_have() -> None:
    layers = [STATE if at % 3 else FULL for at in range(200)]
    rules = written_out([seen(layers)])
    assert len(rules.layers) > 2
    assert all(len(rule["when"]) <= 200 for rule in rules.layers[:-1])


def test_shapes_differ_by_structure_and_not_by_size() -> None:
    assert shape(ring(8)) == shape(ring(128))
    assert shape(STATE) != shape(CacheSpec("arrays", (("slots", 1),)))


def test_two_entries_a_layer_are_counted_by_a_sum() -> None:
    def doubled(count: int) -> Observation:
        layers = [*[FULL] * count, *[ring(8)] * count]
        return Observation("it", {"num_hidden_layers": count, "window": 8}, layers, 2 * count, layers)

    rules = generalise([doubled(2), doubled(5)])
    assert rules.count == "num_hidden_layers + num_hidden_layers"
    assert rules.layers[0] == {"when": "i < num_hidden_layers", "cache": "linear"}
