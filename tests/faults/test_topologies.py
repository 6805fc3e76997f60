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
from mlx_audit.models.target import Target, resolve_target


def subject_of(topology: Topology, **changes: Any) -> Subject:
    """Return the healthy subject of a stack."""
    if topology.file is None:
        target = resolve_target(topology.family)
    else:
        target = Target(
            topology.name,
            "file",
            topology.name,
            None,
            file=topology.file,
            config=topology.config,
            config_name="t",
        )
    entries = make_plan(Request.of(target, Options())).entries
    found = next(
        entry.subject
        for entry in entries
        if entry.subject is not None and topology.variant in ("", entry.subject.variant)
    )
    return replace(found, config=found.tiny, **changes)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
def test_traits(topology: Topology) -> None:
    assert traits_of(subject_of(topology)) == topology.traits
