"""Which checks catch which public bug report: `python tests/meta/case_table.py` makes the page of the trials."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from mlx_audit.faults import FAULTS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "cases.md"
_CODE = re.compile(r"\b(?:ENV|TOP|TRC|PAR|STA|MSK|CAP|LIF|NEG)\d{3}\b")
_SHORT = re.compile(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)")

PLANTED: dict[str, tuple[str, ...]] = {
    "mlx-swift-lm/issues/406": ("frozen_write", "frozen_rope", "frozen_mask"),
    "mlx/issues/2481": ("state_without_its_last_array", "state_baked_in"),
    "transformers.js/pull/1745": ("failed_step_advances", "failed_step_leaves_tracers_in_the_state"),
    "mlx/issues/3964": ("position_as_python_int",),
    "tt-xla/pull/3688": ("traced_again_at_the_turn", "a_rung_for_every_token"),
    "mlx/pull/3917": ("guard_too_late", "capacity_without_the_prompt"),
    "rMLX/pull/238": ("write_dropped_from_16", "write_clamped_to_the_last_slot"),
    "vllm/pull/43961": ("unwritten_slots_hold_nan", "unwritten_slots_hold_infinity"),
    "mlx-lm/pull/390": ("mask_window_too_wide", "ring_window_too_wide"),
    "d-inference/pull/482": ("ring_window_by_slot", "mask_row_all_false"),
    "mlx-lm/issues/1776": ("ring_takes_back_after_turning",),
    "mlx-swift-lm/pull/39": ("fetched_a_cut",),
    "mlx-lm/issues/1494": ("composite_trims_its_last_part", "session_trims_what_can", "trim_lies"),
    "mlx-lm/pull/1736": ("left_padding_seen", "ids_beyond_the_lengths_are_read"),
    "mlx-lm/issues/1806": ("position_in_place",),
}
"""By the end of a report's address, the planted faults that repeat its mistake in caches and sessions of ours."""

_HEAD = """# Public bug reports, and what catches them

Each was retold as a small trial, which the test suite runs: the trial comes out as it should have, or is reported.
The same mistakes are planted in our own caches and sessions (`mlx-audit faults`), where the checks named here must see
them. This page is made of both; `mlx-audit explain CODE` says what a check does.

| report | what went wrong | planted as | seen by | trial |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Case:
    """A trial: the test, the report's address, its lesson, and the codes that its body names."""

    test: str
    address: str
    lesson: str
    codes: tuple[str, ...]


def cases() -> list[Case]:
    """Return every test whose docstring begins with the address of a report, by address."""
    found = []
    for path in sorted(HERE.glob("test_cases*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, node in functions.items():
            text = ast.get_docstring(node) or ""
            if name.startswith("test_") and text.startswith("https://"):
                address, _, lesson = text.partition("\n")
                body = _with_helpers(node, functions)
                codes = sorted(set(_CODE.findall(body)))
                words = _sentence(lesson) or " ".join(name.split("_")[4:])
                found.append(Case(f"{path.stem}::{name}", address.split()[0], words, tuple(codes)))
    return sorted(found, key=lambda case: (case.address, case.test))


def _with_helpers(node: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> str:
    """Return the source of a test and of the helpers that it calls in its own file."""
    called = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in functions}
    return "\n".join(ast.unparse(part) for part in [node, *(functions[name] for name in sorted(called))])


def _sentence(lesson: str) -> str:
    return " ".join(lesson.split()).partition(". ")[0].rstrip(".")


def render() -> str:
    """Return the page."""
    lines = []
    for case in cases():
        match = _SHORT.search(case.address)
        name = f"{match[1]}#{match[2]}" if match else case.address
        faults = [
            FAULTS[fault] for end, names in PLANTED.items() if case.address.endswith(end) for fault in names
        ]
        codes = ", ".join(sorted({*case.codes, *(fault.by for fault in faults)}))
        planted = ", ".join(f"`{fault.name}`" for fault in faults)
        test = case.test.partition("::")[2]
        lines.append(f"| [{name}]({case.address}) | {case.lesson} | {planted} | {codes} | `{test}` |")
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
