"""On a terminal: a bar that goes away again, and colour; neither with NO_COLOR or CI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from command import COMMAND, environment
from model_files import write_config, write_model

ESCAPE = "\x1b["


def on_a_terminal(*arguments: str | Path, env: dict[str, str | None]) -> str:
    """Run the command line with a terminal on stdout and stderr and return what it wrote there."""
    ours, theirs = os.openpty()
    clean: dict[str, str | None] = {"NO_COLOR": None, "CI": None, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(clean | env),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:
        pass  # how Linux says that the other end is closed
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return written.decode()


def test_a_bar_and_colour(tmp_path: Path) -> None:
    model, config = write_model(tmp_path, "mine"), write_config(tmp_path)
    text = on_a_terminal("run", model, "--config", config, "--only", "TRC001", env={})
    assert f"{ESCAPE}35m? undecided" in text
    assert "1/1" in text
    assert text.rindex(f"{ESCAPE}2K") < text.index("? undecided")


@pytest.mark.parametrize("name", ["NO_COLOR", "CI"])
def test_no_colour_and_no_bar_where_they_are_not_wanted(tmp_path: Path, name: str) -> None:
    model, config = write_model(tmp_path, "mine"), write_config(tmp_path)
    text = on_a_terminal("run", model, "--config", config, "--only", "TRC001", env={name: "1"})
    assert ESCAPE not in text
    assert text.startswith("? undecided  mine default  config  no claim  partial: 1 passed")
