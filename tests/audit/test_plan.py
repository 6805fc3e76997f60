"""Which subjects an audit consists of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_audit import resources
from mlx_audit.audit.plan import Plan, make_plan, unmet_requirements
from mlx_audit.audit.request import Options, Request
from mlx_audit.errors import TargetError
from mlx_audit.evidence.codes import RESTORE
from mlx_audit.models.target import resolve_target
from model_files import write_config, write_model
from tiny_models import config_of

PUBLISHED = resources.model_audits() / "configurations"


def plan_of(text: str | Path, config: Path | None = None, **options: Any) -> Plan:
    request = Request.of(resolve_target(str(text), config), Options(**options), config)
    return make_plan(Request.model_validate_json(request.model_dump_json()))


def names(plan: Plan) -> list[str]:
    return [f"{entry.planned.variant}/{entry.planned.configuration}" for entry in plan.entries]


def tiers(plan: Plan, index: int) -> set[str]:
    return {check.tier for check in plan.entries[index].checks}


def test_a_family_is_tiny_its_rope_kinds_and_published_configurations() -> None:
    plan = plan_of("qwen2")
    assert names(plan) == [
        "full/tiny",
        "full/tiny+linear",
        "full/tiny+yarn",
        "full/Qwen--Qwen2.5-0.5B-Instruct",
        "full/Qwen--Qwen2-7B",
        "full/Qwen--Qwen2.5-3B",
        "full/tiny+dynamic",
    ]
    assert [entry.planned.claimed for entry in plan.entries] == ["capable"] * 6 + ["undecided"]
    subjects = [entry.subject for entry in plan.entries]
    assert [subject is not None and subject.main for subject in subjects] == [
        True,
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert tiers(plan, 0) == {"static", "trace", "numeric"}
    assert tiers(plan, 3) == {"static", "trace"}
    assert plan.entries[3].planned.borrows == [0]


def test_configurations_left_out_are_named_with_the_reason() -> None:
    skipped = plan_of("qwen2").skipped
    assert "Qwen--Qwen2.5-7B: same arguments as Qwen--Qwen2-7B" in skipped
    assert "Qwen--Qwen2.5-72B: profile quick takes 3 a variant" in skipped
    plan = plan_of("llama", profile="ci")
    published = [entry.planned.configuration for entry in plan.entries if entry.planned.published]
    left_out = [item.partition(": ")[0] for item in plan.skipped]
    assert all("same arguments" in item for item in plan.skipped)
    assert len(set(published)) == len(published)
    request = resolve_target("llama")
    assert request.manifest is not None
    assert sorted(published + left_out) == sorted(request.manifest.configurations)


def test_a_published_configuration_rests_on_the_tiny_one_of_its_rope_kind() -> None:
    plan = plan_of("llama")
    entry = next(e for e in plan.entries if e.planned.configuration == "meta-llama--Llama-3.2-1B")
    assert [plan.entries[at].planned.configuration for at in entry.planned.borrows] == ["tiny+llama3", "tiny"]
    assert entry.subject is not None
    assert entry.subject.rope == "llama3"
    assert entry.subject.tiny["rope_scaling"]["rope_type"] == "llama3"


def test_variants_claimed_undecided_come_last_and_are_planned_all_the_same(tmp_path: Path) -> None:
    text = (resources.model_audits() / "llama.yaml").read_text(encoding="utf-8")
    head, _, _ = text.partition("configurations:")
    manifest = tmp_path / "open.yaml"
    manifest.write_text(head.replace("compiled_decode: capable", "compiled_decode: undecided", 1), "utf-8")
    plan = plan_of(manifest)
    claims = [entry.planned.claimed for entry in plan.entries if entry.planned.variant == "full"]
    assert set(claims) == {"undecided"}
    assert names(plan).index("full/tiny") > names(plan).index("sliding/tiny+dynamic")
    sliding = next(e.subject for e in plan.entries if e.planned.variant == "sliding")
    assert sliding is not None
    assert sliding.exercised == {0, 1}
    assert sliding.exactness == "reordered"


@pytest.mark.parametrize(
    ("family", "name", "layers"),
    [("qwen3_5_moe", "Qwen--Qwen3.5-397B-A17B", 60), ("gemma3n", "google--gemma-3n-E4B", 20)],
)
def test_a_nested_configuration_is_planned_by_its_text_part(family: str, name: str, layers: int) -> None:
    plan = plan_of(family, PUBLISHED / f"{name}.json")
    subject = plan.entries[0].subject
    assert subject is not None
    assert subject.rope == "default"
    assert len(subject.expected or ()) == layers
    kinds = {e.planned.configuration: e.subject.rope for e in plan_of(family).entries if e.subject}
    assert all(configuration.partition("+")[2] in ("", kind) for configuration, kind in kinds.items())
    assert ("tiny+yarn" in kinds) == (family == "qwen3_5_moe")


def test_a_given_configuration_stands_alone_and_borrows() -> None:
    config = PUBLISHED / "meta-llama--Meta-Llama-3.1-405B.json"
    plan = plan_of("llama", config)
    assert names(plan) == ["full/meta-llama--Meta-Llama-3.1-405B", "full/tiny+llama3", "full/tiny"]
    assert [entry.planned.reported for entry in plan.entries] == [True, False, False]
    assert [entry.after for entry in plan.entries] == [None, 0, 0]
    assert tiers(plan, 1) == {"numeric"}
    assert names(plan_of("llama", config, tiers=["trace", "static"])) == names(plan)[:1]


def test_a_configuration_that_no_variant_covers_is_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "half.yaml"
    text = (resources.model_audits() / "llama.yaml").read_text(encoding="utf-8")
    head, _, _ = text.partition("configurations:")
    start, end = head.index("  full:"), head.index("  sliding:")
    manifest.write_text(head[:start] + head[end:], encoding="utf-8")
    with pytest.raises(TargetError, match="no variant"):
        plan_of(manifest, write_config(tmp_path))


def test_a_model_file_is_one_subject(tmp_path: Path) -> None:
    plan = plan_of(write_model(tmp_path, "mine"), write_config(tmp_path))
    assert names(plan) == ["default/config"]
    subject = plan.entries[0].subject
    assert subject is not None
    assert subject.expected is None
    assert subject.exactness == ""
    assert plan.entries[0].planned.claimed is None


def test_a_checkpoint_adds_its_tier(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    plan = plan_of(tmp_path)
    assert names(plan) == [f"full/{tmp_path.name}", "full/tiny"]
    subject = plan.entries[0].subject
    assert subject is not None
    assert subject.checkpoint == tmp_path.resolve()
    assert "checkpoint" in tiers(plan, 0)
    assert plan.entries[1].subject is not None
    assert plan.entries[1].subject.checkpoint is None


def test_only_and_tier_select(tmp_path: Path) -> None:
    plan = plan_of("qwen2", only=["TRC001", "PAR001"])
    assert [c.code for c in plan.entries[0].checks] == ["TRC001", "PAR001"]
    assert [c.code for c in plan.entries[3].checks] == ["TRC001"]
    assert tiers(plan_of("qwen2", tiers=["static"]), 0) == {"static"}


def test_requirements_that_are_not_met_block_everything(tmp_path: Path) -> None:
    manifest = tmp_path / "later.yaml"
    text = (resources.model_audits() / "qwen2.yaml").read_text(encoding="utf-8")
    head, _, _ = text.partition("configurations:")
    manifest.write_text(head + 'requires: {mlx-lm: ">=99"}\n', encoding="utf-8")
    plan = plan_of(manifest)
    assert names(plan) == ["full/tiny"]
    assert plan.entries[0].subject is None
    assert plan.entries[0].checks
    assert "mlx-lm" in plan.entries[0].blocked
    assert ">=99" in plan.entries[0].blocked


def test_unmet_requirements_name_what_is_there() -> None:
    assert unmet_requirements({"mlx": ">=0.1"}) == ""
    assert "is not installed" in unmet_requirements({"no-such-package-here": ">=1"})


def restored(plan: Plan) -> dict[str, list[str]]:
    """Return the planned checks of restored prefixes by configuration."""
    return {
        entry.planned.configuration: [c.code for c in entry.checks if c.claim == RESTORE]
        for entry in plan.entries
    }


def test_restores_are_checked_where_the_manifest_claims_them() -> None:
    plan = plan_of("qwen2")
    # RST007 needs checks of compiled decoding, and comes after them.
    codes = [f"RST00{number}" for number in (1, 2, 3, 4, 5, 6, 8, 7)]
    assert restored(plan) == {
        **dict.fromkeys(("tiny", "tiny+linear", "tiny+yarn"), codes),
        **{name: [] for name in ("Qwen--Qwen2.5-0.5B-Instruct", "Qwen--Qwen2-7B", "Qwen--Qwen2.5-3B")},
        "tiny+dynamic": [],
    }
    assert {entry.planned.restore for entry in plan.entries} == {"capable", "undecided"}
    assert not any(map(len, restored(plan_of("jamba")).values()))


def test_restores_are_checked_where_they_are_asked_for() -> None:
    plan = plan_of("jamba", only=["RST001", "TRC001"])
    assert restored(plan)["tiny"] == ["RST001"]
    assert plan.entries[0].planned.restore is None
    assert [c.code for c in plan.entries[0].checks] == ["TRC001", "RST001"]


def test_nothing_compiled_is_asked_of_what_is_claimed_not_to_be_capable() -> None:
    found = {name: plan_of(name).entries[0].subject for name in ("llama4", "qwen2")}
    assert {name: subject is not None and subject.decodes for name, subject in found.items()} == {
        "llama4": False,
        "qwen2": True,
    }
