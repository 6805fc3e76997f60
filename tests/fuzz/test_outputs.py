"""Full disks, places that take no files, two writers at once: the old file or the new one, and nothing left over."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from command import COMMAND, environment, mlx_audit
from fuzz.parsers import ggufs, results
from mlx_audit import resources

CHILD = Path(__file__).with_name("command_child.py")

UNWRITABLE = "/proc/mlx-audit"
"""Below a folder that takes no files, not even from root."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and /proc are Linux's")

OLD = {
    "json": '{"old": true}\n',
    "html": "<!doctype html>",
    "xml": "<?xml",
    "md": "# mlx-audit",
    "yaml": "family: x\n",
}
"""How a file begins that the verb takes for its own and may write over."""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what verbs read: results, a configuration, a checkpoint."""
    folder = tmp_path_factory.mktemp("read")
    (folder / "results.json").write_bytes(results()[0])
    (folder / "model.gguf").write_bytes(ggufs()[0])
    source = resources.model_audits() / "configurations" / "TinyLlama--TinyLlama-1.1B-Chat-v1.0.json"
    (folder / "config.json").write_bytes(source.read_bytes())
    return folder


def writers(read: Path, place: Callable[[str], str]) -> dict[str, list[str]]:
    """Return command lines by the name of what they write; `place` gives the path of a name."""
    report = ["report", str(read / "results.json")]
    found = {
        "schema.json": ["schema", "-o"],
        "run.json": ["run", "llama", "--only", "TOP003", "--json"],
        "adapt.py": ["adapt", "llama", "--force", "-o"],
        "html.html": [*report, "--html"],
        "markdown.md": [*report, "--markdown"],
        "junit.xml": [*report, "--junit"],
        "sarif.json": [*report, "--sarif"],
        "draft.yaml": ["draft", "llama", "--config", str(read / "config.json"), "--force", "-o"],
    }
    return {name: [*arguments, place(name)] for name, arguments in found.items()}


def limited() -> None:
    # No bytes for files: what a full disk is.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def refused(lines: dict[str, list[str]], *, full: bool = False) -> dict[str, str]:
    """Run command lines, each of which must end with 2 and a reason; return what each said."""
    done = subprocess.run(
        [sys.executable, CHILD],
        input=json.dumps(list(lines.values())),
        env=environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        preexec_fn=limited if full else None,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = dict(zip(lines, json.loads(done.stdout)["outcomes"], strict=True))
    wrong = {
        name: outcome for name, outcome in outcomes.items() if outcome["code"] != 2 or outcome["strange"]
    }
    assert not wrong, wrong
    return {name: outcome["text"] for name, outcome in outcomes.items()}


@linux
@pytest.mark.nightly
def test_a_full_device_is_said(read: Path) -> None:
    said = refused(writers(read, lambda _: "/dev/full"))
    for name, text in said.items():
        assert "No space left on device" in text, (name, text)


def test_a_full_disk_leaves_the_old_file_and_no_other(read: Path, tmp_path: Path) -> None:
    lines = writers(read, lambda name: str(tmp_path / name))
    del lines["run.json"], lines["draft.yaml"]  # their children cannot compile without a disk
    for name in lines:
        (tmp_path / name).write_text(OLD.get(name.rpartition(".")[2], "# by hand\n"), encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    said = refused(lines, full=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    for name, text in said.items():
        assert "File too large" in text, (name, text)


@linux
def test_a_folder_that_takes_no_files_is_said(read: Path) -> None:
    lines = writers(read, lambda name: f"{UNWRITABLE}.{name}")
    for name in ("run.json", "draft.yaml", "adapt.py"):
        del lines[name]  # what a device that is full says, they say at the same place
    lines["convert"] = ["convert", str(read / "model.gguf"), f"{UNWRITABLE}.folder"]
    refused(lines)
    below = writers(read, lambda name: f"{UNWRITABLE}/below/{name}")
    below["faults.json"] = ["faults", "mamba2", "--json", f"{UNWRITABLE}/below/faults.json"]
    below["repro.py"] = ["run", "llama", "--repro", f"{UNWRITABLE}/below/repro.py"]
    below["bench.svg"] = [
        "bench",
        "--from",
        str(read / "results.json"),
        "--svg",
        f"{UNWRITABLE}/below/bench.svg",
    ]
    refused(below)


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    place = tmp_path / "schema.json"
    wanted = mlx_audit("schema").stdout
    assert mlx_audit("schema", "-o", place).returncode == 0
    stop, torn = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            if place.read_text(encoding="utf-8") != wanted:
                torn.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    writers = [subprocess.Popen([*COMMAND, "schema", "-o", str(place)]) for _ in range(4)]
    codes = [writer.wait(60) for writer in writers]
    stop.set()
    watcher.join()
    assert codes == [0] * 4
    assert not torn
    assert [path.name for path in tmp_path.iterdir()] == ["schema.json"]


@pytest.mark.nightly
def test_audits_at_once_leave_one_whole_document(tmp_path: Path) -> None:
    place = tmp_path / "out.json"
    command = [*COMMAND, "run", "llama", "--only", "TOP003", "--json", str(place)]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [one.wait(120) for one in runs] == [0, 0]
    assert json.loads(place.read_text(encoding="utf-8"))["results"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
