"""What files say is held to what is asked today: each check, in its own tier, and one of each tier that passed."""

from __future__ import annotations

from evidence.conftest import every_check
from mlx_audit.evidence.asked import decide_today, lacking
from mlx_audit.evidence.codes import RESTORE, check_tiers, needed_codes, rests_on
from mlx_audit.evidence.results import CheckResult


def moved(code: str, **changes: object) -> list[CheckResult]:
    """Return every check, one of them changed."""
    return [c.model_copy(update=changes) if c.code == code else c for c in every_check()]


def test_all_that_is_asked_is_capable_and_without_one_undecided() -> None:
    checks = every_check()
    assert decide_today(checks).name == "capable"
    assert decide_today(checks, limits=["text"]).name == "limited"
    assert lacking(checks) == []
    for code in needed_codes():
        left = [check for check in checks if check.code != code]
        assert decide_today(left, where="tiny: the record") == ("undecided", f"tiny: the record lacks {code}")


def test_a_check_that_hides_in_another_tier_is_not_there() -> None:
    """The checkpoint tier may be left out; a check that was not run must not pass as one of it."""
    hidden = moved("PAR001", tier="checkpoint", status="not-run", reason="it failed")
    assert decide_today(hidden) == ("undecided", "it lacks PAR001")
    assert decide_today(moved("PAR001", tier="static")) == ("undecided", "it lacks PAR001")


def test_checks_that_all_do_not_apply_prove_nothing() -> None:
    for tier in ("static", "trace", "numeric"):
        idle = [
            c.model_copy(update={"status": "not-applicable"}) if c.tier == tier else c for c in every_check()
        ]
        assert decide_today(idle) == ("undecided", f"it has no {tier} check that passed")


def test_what_a_claim_rests_on_may_be_without_application() -> None:
    """A model without a manifest has no rules that its caches could be compared with."""
    needed = needed_codes(RESTORE)
    checks = [CheckResult(code=code, name="x", tier=check_tiers()[code], status="pass") for code in needed]
    idle = [
        c.model_copy(update={"status": "not-applicable"}) if c.code in rests_on(RESTORE) else c
        for c in checks
    ]
    assert decide_today(idle, claim=RESTORE).name == "capable"


def test_a_failure_stays_a_failure_and_a_claim_needs_its_own_checks() -> None:
    assert decide_today(moved("PAR001", status="fail", reason="off by one")).name == "not-capable"
    assert decide_today([]).name == "undecided"
    decode = needed_codes() - needed_codes(RESTORE)
    only_decode = [check for check in every_check() if check.code in decode]
    assert decide_today(only_decode, claim=RESTORE).name == "undecided"
    assert decide_today(every_check(), claim="rope.yarn").name == "undecided", (
        "nothing decides an unknown claim"
    )
    assert set(check_tiers().values()) >= {"static", "trace", "numeric", "checkpoint"}
