"""PAR008: what a patch changes in eager decoding is seen; what the unpatched model could not do is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from audited import green, mutated, new_subject, only, red
from tiny_models import module_of

FORWARD = "out = self.model(inputs, cache, input_embeddings)"


def test_an_unpatched_model_has_nothing_to_compare() -> None:
    assert only("PAR008", new_subject()).status == "not-applicable"


def test_a_patch_that_changes_nothing_is_equal_bit_by_bit(tmp_path: Path) -> None:
    figures = green("PAR008", new_subject(module=mutated(tmp_path), original=module_of("llama"))).figures
    assert figures["bit_equal"]
    assert figures["compared"] == 39, "three ways of prefill, each with its twelve steps"
    assert figures["upstream"] == {}


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("self.scale = head_dim**-0.5", "self.scale = 1.01 * head_dim**-0.5", "step 0"),
        (FORWARD, f"{FORWARD}\n        out = out if inputs.shape[1] == 1 else 1.01 * out", "in one piece"),
        (
            FORWARD,
            f"{FORWARD}\n        out = out if cache is None or cache[0].offset < 20 else 1.01 * out",
            "step 7",
        ),
    ],
)
def test_a_patch_that_changes_eager_decoding_fails(tmp_path: Path, old: str, new: str, place: str) -> None:
    patched = mutated(tmp_path, (old, new))
    assert place in (red("PAR008", new_subject(module=patched, original=module_of("llama"))).where or "")


def test_a_patch_that_renames_parameters_fails(tmp_path: Path) -> None:
    patched = mutated(tmp_path, ("self.embed_tokens", "self.embedding"))
    result = red("PAR008", new_subject(module=patched, original=module_of("llama")))
    assert "embed" in result.reason


def test_where_the_unpatched_model_raises_the_figures_say_so(tmp_path: Path) -> None:
    single = mutated(tmp_path, (FORWARD, f"assert inputs.shape[1] == 1, 'one by one'\n        {FORWARD}"))
    figures = green("PAR008", new_subject(module=mutated(tmp_path), original=single)).figures
    assert list(figures["upstream"]) == ["prompt in one piece", "prompt in fives"]
    assert "one by one" in figures["upstream"]["prompt in fives"]
    never = mutated(tmp_path, (FORWARD, f"raise ValueError('never')\n        {FORWARD}"))
    result = only("PAR008", new_subject(module=mutated(tmp_path), original=never))
    assert (result.status, "never" in result.reason) == ("not-run", True)


def test_a_patched_model_that_raises_fails(tmp_path: Path) -> None:
    patched = mutated(tmp_path, (FORWARD, f"assert inputs.shape[1] != 5, 'no fives'\n        {FORWARD}"))
    result = red("PAR008", new_subject(module=patched, original=module_of("llama")))
    assert "no fives" in result.reason


def test_an_unpatched_model_that_contradicts_itself_is_told_and_token_by_token_counts(tmp_path: Path) -> None:
    wrong = f"{FORWARD}\n        out = out if inputs.shape[1] == 1 else 1.01 * out"
    figures = green(
        "PAR008", new_subject(module=mutated(tmp_path), original=mutated(tmp_path, (FORWARD, wrong)))
    ).figures
    assert figures["upstream"]["prompt in fives"].startswith("differs from its own result one by one: ")


@pytest.mark.parametrize(
    "wrong",
    [
        "out = out if cache is None or cache[0].offset < 500 else 1.1 * out",
        "out = out * (1 + 1e-9 * (mx.array([0 if cache is None else cache[0].offset]) ** 2)[0])",
    ],
    ids=["a threshold", "a square in 32 bits"],
)
def test_a_patch_that_changes_what_comes_late_fails(tmp_path: Path, wrong: str) -> None:
    exact = wrong.replace("mx.array([0", "float(0").replace("offset]) ** 2)[0]", "offset) ** 2)")
    right = exact if "float" in exact else "pass"
    pair = [mutated(tmp_path, (FORWARD, f"{FORWARD}\n        {code}")) for code in (wrong, right)]
    result = red("PAR008", new_subject(module=pair[0], original=pair[1]))
    assert "far position" in (result.where or ""), result.where
