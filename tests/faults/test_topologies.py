"""The stacks that faults are planted in have what the table says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_audit.audit.plan import make_plan
from mlx_audit.audit.planting import traits_of
from mlx_audit.audit.request import Options, Request
from mlx_audit.checks.subject import Subject
from mlx_audit.faults.topologies import TOPOLOGIES, Topology


def subject_of(topology: Topology, **changes: Any) -> Subject:
    """Return the healthy subject of a stack."""
    entries = make_plan(Request.of(topology.target(), Options())).entries
    found = next(
        entry.subject
        for entry in entries
        if entry.subject is not None and topology.variant in ("", entry.subject.variant)
    )
    return replace(found, config=found.tiny, **changes)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
def test_traits(topology: Topology) -> None:
    assert traits_of(subject_of(topology)) == topology.traits
