"""Configurations near a tiny one: everything that could be a rule's argument moves at least once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_audit.audit.drafting_variations import home_of, variations


@dataclass
class Arguments:
    num_hidden_layers: int = 4
    interval: int = 2
    pattern: str = "M-M*"
    layer_types: list[str] = field(default_factory=lambda: list("abab"))


CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": list("abab"),
    "linear": {"full_layers": [2, 4], "freq": [0, 1, 1, 1]},
}


def found() -> list[Any]:
    return list(variations(CONFIG, [Arguments()], 4))


def test_other_numbers_of_layers_keep_lists_as_long() -> None:
    longer = [item for item in found() if item.label == "7 layers"]
    assert [item.config["num_hidden_layers"] for item in longer] == [7]
    assert longer[0].config["layer_types"] == list("abababa")
    assert longer[0].config["linear"]["freq"] == [0, 1, 1, 1, 0, 1, 1]


def test_values_that_disagree_with_each_other_bind_nothing() -> None:
    odd = [item for item in found() if not item.binding]
    assert [item.label for item in odd] == ["num_hidden_layers 5 alone"]


def test_defaults_are_varied_and_nothing_becomes_zero() -> None:
    intervals = [item.config["interval"] for item in found() if "interval" in item.config]
    assert set(intervals) == {1, 3, 5}


def test_lists_inside_mappings_move_too() -> None:
    inner = [item.config["linear"] for item in found()]
    assert {"full_layers": [2, 4], "freq": [1, 1, 1, 0]} in inner
    assert {"full_layers": [1, 3], "freq": [0, 1, 1, 1]} in inner


def test_the_configuration_itself_is_left_as_it_was() -> None:
    before = repr(CONFIG)
    found()
    assert repr(CONFIG) == before


def test_arguments_are_found_in_the_mapping_that_has_their_names() -> None:
    assert home_of({"model_type": "x", "text_config": {"num_hidden_layers": 4}}, Arguments()) == (
        "text_config",
    )
    assert home_of({"num_hidden_layers": 4, "text_config": {}}, Arguments()) == ()
