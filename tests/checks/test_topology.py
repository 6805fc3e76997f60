"""TOP001-003: is the declared topology the one that the model has?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from audited import green, healthy, mutated, new_subject, only, red
from mlx_audit.manifests import CacheSpec
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
    assert green("TOP001", subject).figures["kinds"] == {"rotating": 2, "linear": 2}


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


def test_a_cache_class_of_the_models_own(tmp_path: Path) -> None:
    module = _own_cache(tmp_path, "type('LayerCache', (KVCache,), {})()")
    result = red("TOP003", new_subject(module=module))
    assert result.reason.startswith("cache 0: ")
    assert result.reason.endswith("LayerCache is not a cache class of mlx-lm")


def test_a_kind_without_a_fixed_capacity_form_is_undecided() -> None:
    result = only("TOP003", new_subject(config=config_of("llama", **SLIDING)))
    assert result.status == "not-run"
    assert "cache 0: there is no fixed-capacity cache for kind rotating yet" in result.reason


def test_without_a_manifest_two_of_them_say_nothing() -> None:
    subject = new_subject(expected=None)
    assert [only(code, subject).status for code in ("TOP001", "TOP002")] == ["not-applicable"] * 2
