"""All readers of foreign files, fed with what nobody means well: values or typed errors, soon, and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command import environment

CHILD = Path(__file__).with_name("child.py")
CORPUS = Path(__file__).with_name("corpus")
GROUPS = (
    ("manifest", "expression", "configuration", "known_failures", "source"),
    ("results", "record", "stamp", "card", "weights", "gguf"),
)
"""Parsers that share a process: an even half of the time each."""
NAMES = [name for group in GROUPS for name in group]
SHARES = {"manifest": 1, "source": 1, "configuration": 1, "results": 2, "gguf": 2}
"""How many inputs a parser gets beside the others', 4 of each: those that are slow to read get fewer."""

ORDINARY, NIGHTLY = 1_000, 10_000
"""Inputs over all parsers, those of the corpus not counted."""
MOST_BYTES = 1 << 30
MOST_SECONDS = 2.0


def feed(names: tuple[str, ...], inputs: int, seed: int) -> None:
    total = sum(SHARES.get(name, 4) for name in NAMES)
    counts = {name: -(-inputs * SHARES.get(name, 4) // total) for name in names}
    done = subprocess.run(
        [sys.executable, CHILD, json.dumps(counts), str(seed)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-6000:]}"
    told = json.loads(done.stdout)
    assert set(told["parsers"]) == set(names)
    assert told["peak"] < MOST_BYTES
    for name, found in told["parsers"].items():
        outcomes = found["outcomes"]
        assert sum(outcomes.values()) >= counts[name], (name, outcomes)
        assert found["slowest"] < MOST_SECONDS, name
        # The inputs are near enough to real ones to reach what lies behind the first check.
        assert outcomes["value"] > 0, name


def test_every_parser_is_fed_and_has_a_corpus() -> None:
    from fuzz.parsers import PARSERS

    assert sorted(NAMES) == sorted(PARSERS) == sorted(folder.name for folder in CORPUS.iterdir())
    assert len([path for path in CORPUS.rglob("*") if path.is_file()]) > 180
    assert max(path.stat().st_size for path in CORPUS.rglob("*")) < 8192


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_inputs_give_values_or_typed_errors(group: tuple[str, ...]) -> None:
    feed(group, ORDINARY, seed=7)


@pytest.mark.nightly
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_many_inputs_give_values_or_typed_errors(group: tuple[str, ...]) -> None:
    import secrets

    feed(group, NIGHTLY, seed=secrets.randbelow(2**32))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("raise KeyError('no typed error')", "KeyError: 'no typed error'"),
        ("while True: pass", "TooSlow"),
        ("from mlx_audit.errors import MlxAuditError; raise MlxAuditError('lost')", "nowhere: lost"),
        ("from mlx_audit.errors import NotCompileCapable as E; raise E('x', where='y')", "NotCompileCapable"),
    ],
)
def test_the_feeder_sees_what_it_is_for(harm: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / "harmed.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(CHILD.parents[1])!r})\n"
        "from dataclasses import replace\nfrom fuzz import child, parsers\n\n\n"
        f"def harmed(path):\n    {harm}\n\n\n"
        "known = parsers.PARSERS['known_failures']\nparsers.PARSERS['known_failures'] = replace(known, read=harmed)\n"
        "child.main({'known_failures': 1}, 1)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert says in done.stderr
