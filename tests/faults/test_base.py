"""A planted fault is small, named, for one check, and gone when the planting ends."""

from __future__ import annotations

import itertools

import pytest

from mlx_audit.caches import FixedCapacityKVCache
from mlx_audit.checks.base import all_checks
from mlx_audit.faults import FAULTS, DoesNotApply, planted
from mlx_audit.faults.base import Planter, fault
from mlx_audit.faults.topologies import TOPOLOGIES

CODES = {check.code for check in all_checks() if check.tier != "checkpoint"}
KINDS = {"linear", "rotating", "arrays", "chunked", "quantized", "composite"}


def test_there_are_many_and_each_is_for_a_check_that_exists() -> None:
    assert len(FAULTS) >= 130
    assert {name: f.by for name, f in FAULTS.items() if f.by not in CODES} == {}


def test_every_check_of_code_has_a_fault_of_its_own() -> None:
    """What reads texts is not moved by a patch of code: TOP002 and TOP004 compare a manifest with configurations, SRC
    reads sources, and PAR008 compares two of them; their tests plant the mistakes in the texts."""
    of_texts = {check.code for check in all_checks() if check.by_reading} | {"TOP002", "TOP004", "PAR008"}
    assert CODES - {f.by for f in FAULTS.values()} == of_texts


def test_every_fault_says_what_is_wrong() -> None:
    for name, found in FAULTS.items():
        assert found.about[:1].isupper() or found.about[:1] == "`", name
        assert len(found.about) < 120, name


def test_every_fault_has_a_stack_where_its_check_is_sound() -> None:
    for found in FAULTS.values():
        homes = [t for t in TOPOLOGIES if found.applies(t.traits) and found.by not in t.unsound]
        assert homes, found.name
    assert set(itertools.chain.from_iterable(t.traits for t in TOPOLOGIES)) >= KINDS


def test_planting_is_undone_also_when_a_check_raises() -> None:
    own = FixedCapacityKVCache.make_mask

    def fail() -> None:
        with planted(FAULTS["mask_shows_all"]):
            assert FixedCapacityKVCache.make_mask is not own
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert FixedCapacityKVCache.make_mask is own


def test_what_was_inherited_is_inherited_again() -> None:
    class Base:
        value = 1

    class Derived(Base):
        pass

    patch = Planter()
    patch.setattr(Derived, "value", 2)
    patch.setattr(Derived, "value", 3)
    assert Derived.value == 3
    patch.undo()
    assert "value" not in vars(Derived)


def test_a_patch_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError):
        Planter().setattr(FixedCapacityKVCache, "no_such_method", None)


def test_a_fault_of_model_code_needs_a_model() -> None:
    with pytest.raises(DoesNotApply), planted(FAULTS["toggle"]):
        pass


def test_a_name_is_given_once() -> None:
    def toggle(patch: object) -> None:
        """Is there already."""

    with pytest.raises(ValueError, match="two faults of the name toggle"):
        fault("TRC001")(toggle)
