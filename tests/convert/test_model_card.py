"""The section and the tag in a model card: added, replaced, and all the rest kept byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.convert.model_card import BEGIN, END, edited, escaped, section, write_card
from mlx_audit.evidence.results import ClaimResult
from mlx_audit.evidence.stamps import Stamp, StampedCheck

OWN = f"{BEGIN}\nnew\n{END}\n"
OLD = f"{BEGIN}\nold\nlines\n{END}\n"


def stamp(**changes: Any) -> Stamp:
    values: dict[str, Any] = {
        "family": "qwen2",
        "module": "mlx_lm.models.qwen2",
        "variant": "full",
        "verdict": "capable",
        "reason": "2 checks passed",
        "claims": {"compiled_decode": ClaimResult(claimed="capable", verdict="capable")},
        "backend": "cpu",
        "mlx": "0.32",
        "profile": "quick",
        "seed": 0,
        "digests": {},
        "checks": [
            StampedCheck(code="CKP001", tier="checkpoint", status="pass"),
            StampedCheck(code="PAR001", tier="numeric", status="pass"),
        ],
        "files": {},
        "check_again": "mlx-audit run .",
    }
    return Stamp(**{**values, **changes})


FRONTS = {
    "tags in a list": ("license: mit\ntags:\n- a\n- b\nbase_model: x\n", ["a", "b", "mlx-audit"]),
    "tags indented": ("tags:\n  - a\n  - 'b: c'\nlicense: mit\n", ["a", "b: c", "mlx-audit"]),
    "tags in brackets": ("tags: [a, b]\n", ["a", "b", "mlx-audit"]),
    "no tags in brackets": ("tags: []\n", ["mlx-audit"]),
    "tags of nothing": ("tags:\nlicense: mit\n", ["mlx-audit"]),
    "no tags": ("license: mit\nlanguage:\n- en\n", ["mlx-audit"]),
    "nothing": ("", ["mlx-audit"]),
    "a comment": ("# a comment\nlicense: mit # another\n", ["mlx-audit"]),
    "there already": ("tags:\n- mlx-audit\n- a\n", ["mlx-audit", "a"]),
    "colour of comments": ("tags: # what it is\n- a\n", None),
    "tag that is a text": ("tags: a\n", None),
    "brackets over lines": ("tags: [a,\n b]\n", None),
    "no YAML": ("a: b: c: [\n", None),
    "a list": ("- a\n- b\n", None),
    "alias bomb": ("a: &a [x]\nb: &b [*a, *a]\ntags: *b\n", None),
    "a Python object": ("a: !!python/object/apply:os.system ['false']\n", None),
    "deep": ("a: " + "[" * 5_000 + "\n", None),
    "tags twice": ("tags:\n- a\ntags:\n- b\n", None),
    "bracket in a text": ("tags: ['a]']\n", ["a]", "mlx-audit"]),
    "too large": ("a: " + "x" * 70_000 + "\n", None),
}


@pytest.mark.parametrize("case", FRONTS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_front_matter(case: str, newline: str) -> None:
    front, tags = FRONTS[case]
    body = "# Title\n\n---\n\ntext  \n"
    text = f"---\n{front}---\n{body}".replace("\n", newline)
    made, remarks = edited(text, OWN)
    head, tail = made.split(f"---{newline}# Title", 1)
    assert f"---{newline}# Title{tail}" == (f"---\n{body}\n{OWN}").replace("\n", newline)
    if tags is None:
        assert head == f"---\n{front}".replace("\n", newline)
        assert "its front matter is none that can be added to safely" in remarks[0]
        return
    assert remarks == []
    before, after = yaml.safe_load(front) or {}, yaml.safe_load(head.removeprefix("---"))
    assert after == {**before, "tags": tags}
    added = [line for line in head.splitlines() if line not in text.splitlines()]
    assert len(added) <= 2


def test_a_card_that_is_not_there_and_one_without_front_matter() -> None:
    assert edited("", OWN) == (f"---\ntags:\n- mlx-audit\n---\n\n{OWN}", [])
    made, remarks = edited("# Title", OWN)
    assert (made, remarks) == (f"---\ntags:\n- mlx-audit\n---\n\n# Title\n\n{OWN}", [])
    made, remarks = edited("---\nnever closed", OWN)
    assert made.startswith("---\nnever closed")
    assert len(remarks) == 1


def test_the_section_is_replaced_and_nothing_else() -> None:
    text = f"---\ntags:\n- mlx-audit\n---\nbefore\t \n{OLD}after\n\n\n no line break"
    made, remarks = edited(text, OWN)
    assert remarks == []
    assert made == text.replace(OLD, OWN)
    assert edited(made, OWN) == (made, [])


@pytest.mark.parametrize("marks", [f"{BEGIN}\n", f"{END}\n", f"{END}\n{BEGIN}\n", f"{OLD}{OLD}"])
def test_marks_that_are_not_one_pair_are_left(marks: str) -> None:
    text = f"---\ntags:\n- mlx-audit\n---\n{marks}"
    made, (remark,) = edited(text, OWN)
    assert made == text
    assert "are not one pair" in remark


@given(st.text(alphabet="ab-#:[]{}&*!|>'\" \n\r\t\\é\u2028", max_size=60), st.text(max_size=40))
def test_whatever_a_card_says_is_still_said(front: str, body: str) -> None:
    for text in (f"---\n{front}\n---\n{body}", front + body):
        once, _ = edited(text, OWN)
        assert once.count(BEGIN) == 1
        own = OWN if OWN in once else OWN.replace("\n", "\r\n")
        assert own in once
        lost = iter("".join(once.split(own)))
        assert all(character in lost for character in text), "each character, in order"
        twice, _ = edited(once, OWN)
        assert twice == once


def test_values_are_shown_as_they_are() -> None:
    hostile = f"<script>alert(1)</script> | `x` [a](javascript:b) **b** \n{END}\n# h \x1b[31m ![i](http://x)"
    text = section(
        stamp(variant=hostile, reason=hostile, limits=[hostile], verdict="limited", backend=hostile)
    )
    assert text.count(END) == 1
    assert text.count("\n# ") == 0
    assert "<script" not in text
    assert "\x1b" not in text
    assert "](" not in text.replace("\\](", "").replace("\\]\\(", "")
    for line in text.splitlines():
        if line.startswith("| ") and "family" not in line:
            assert line.replace("\\|", "").count("|") == 6
    assert escaped("a_b") == "a\\_b"


def test_what_the_section_says() -> None:
    failing = StampedCheck(code="CKP002", tier="checkpoint", status="fail", reason="token 3")
    text = section(stamp(verdict="not-capable", reason="CKP002", checks=[failing]))
    assert "**not\\-capable**" in text
    assert "Checks: 1 failed. With the real weights: CKP002 failed." in text
    assert "```bash\nmlx-audit run .\n```" in text
    assert text.startswith(f"{BEGIN}\n")
    assert text.endswith(f"{END}\n")


def test_cards_that_are_no_text_or_too_large_are_left(tmp_path: Path) -> None:
    for data, remark in ((b"\xff\xfe", "no UTF-8"), (b"x" * ((1 << 20) + 1), "more than")):
        (tmp_path / "README.md").write_bytes(data)
        assert remark in write_card(stamp(), tmp_path)[0]
        assert (tmp_path / "README.md").read_bytes() == data


def test_a_card_is_written_once(tmp_path: Path) -> None:
    assert write_card(stamp(), tmp_path) == []
    path = tmp_path / "README.md"
    first = path.stat()
    assert write_card(stamp(), tmp_path) == []
    assert path.stat().st_mtime_ns == first.st_mtime_ns
    assert [entry.name for entry in tmp_path.iterdir()] == ["README.md"]
