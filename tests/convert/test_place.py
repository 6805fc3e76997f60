"""DST: made beside its place, named in one step, and nothing left of what was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_folders import write_hf
from mlx_audit.convert.place import Place, PlaceError, publish, require_place, require_room, stage
from mlx_audit.convert.source import Source, resolve_source
from real_checkpoints import write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return resolve_source(str(write_hf(tmp_path_factory.mktemp("source") / "hf")))


def test_a_new_an_empty_and_the_same_folder(source: Source, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert require_place(source, str(tmp_path / "new")) == Place(tmp_path / "new", in_place=False)
    assert not require_place(source, str(tmp_path / "empty")).in_place
    (tmp_path / "link").symlink_to(source.path)
    for same in (source.path, source.path / ".", tmp_path / "link"):
        assert require_place(source, str(same)) == Place(source.path, in_place=True)


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        ("", "", "no folder is named"),
        ("full", "full", "is there and not empty"),
        ("file", "file", "there is a file of that name"),
        ("", "absent/new", "no such folder"),
        ("file", "file/new", "no such folder"),
        ("", "n" * 300, "it cannot be written"),
        ("", "a\0b", "it cannot be written"),
    ],
)
def test_places_that_are_none(source: Source, tmp_path: Path, make: str, text: str, message: str) -> None:
    if make == "file":
        (tmp_path / "file").write_text("")
    elif make:
        (tmp_path / make).mkdir()
        (tmp_path / make / "x").write_text("")
    with pytest.raises(PlaceError, match=message):
        require_place(source, str(tmp_path / text) if text else "")


def test_one_within_the_other(source: Source) -> None:
    with pytest.raises(PlaceError, match="lies within the other"):
        require_place(source, str(source.path / "made"))
    with pytest.raises(PlaceError, match="not empty"):
        require_place(source, str(source.path.parent))


def test_the_folder_of_a_gguf_file_is_another_place(tmp_path: Path) -> None:
    found = resolve_source(str(write_gguf(tmp_path / "tiny.gguf")))
    assert not require_place(found, str(tmp_path / "made")).in_place
    with pytest.raises(PlaceError, match="there is a file of that name"):
        require_place(found, str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("name", ["mlx_audit.json", "README.md"])
def test_a_stamp_is_never_written_through_a_link(tmp_path: Path, name: str) -> None:
    folder = write_hf(tmp_path / "hf")
    (tmp_path / "theirs").write_text("theirs")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "theirs")
    # SRC itself would be refused too, were the link a file of the model's.
    found = Source("hf", "hf", folder, target=None)  # type: ignore[arg-type]
    with pytest.raises(PlaceError, match="only a file of the folder's own can be written"):
        require_place(found, str(folder))
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_room(tmp_path: Path) -> None:
    place = Place(tmp_path / "new", in_place=False)
    require_room(place, 0)
    with pytest.raises(PlaceError, match="there is no room for the weights"):
        require_room(place, shutil.disk_usage(tmp_path).free + 1)


def test_a_stage_is_gone_in_the_end_and_what_was_made_has_its_name(tmp_path: Path) -> None:
    place = Place(tmp_path / "new", in_place=False)
    with stage(place.path) as folder:
        assert folder.name == f".new.mlx-audit-{os.getpid()}"
        (folder / "made").mkdir()
        (folder / "made" / "x").write_text("x")
        publish(folder / "made", place)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "x").read_text() == "x"
    with pytest.raises(ZeroDivisionError), stage(tmp_path / "other") as folder:
        assert folder.parent == tmp_path / str(1 // 0)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_faster_run_keeps_its_folder(tmp_path: Path) -> None:
    place = Place(tmp_path / "new", in_place=False)
    with stage(place.path) as folder:
        (folder / "made").mkdir()
        place.path.mkdir()
        (place.path / "theirs").write_text("theirs")
        with pytest.raises(PlaceError, match="the folder is there by now"):
            publish(folder / "made", place)
    assert [path.name for path in place.path.iterdir()] == ["theirs"]


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_audit.convert.place import stage
with stage(Path(sys.argv[1])) as folder:
    (folder / "made").mkdir()
    (folder / "made" / "half").write_text("half")
    if sys.argv[2] == "wait":
        print("ready", flush=True)
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_run_is_told_of_and_its_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers that share a disk can have the same process number; a folder without a lock can be taken away."""
    theirs = tmp_path / f".new.mlx-audit-{os.getpid()}"
    theirs.mkdir()
    (theirs / "weights").write_text("x")
    with pytest.raises(PlaceError, match="another run"), stage(tmp_path / "new"):
        pytest.fail("this is their folder")
    assert (theirs / "weights").read_text() == "x"
    shutil.rmtree(theirs)
    made = Path.mkdir

    def taken_away(path: Path) -> None:
        made(path)
        path.rmdir()

    monkeypatch.setattr(Path, "mkdir", taken_away)
    with pytest.raises(PlaceError, match="another run"), stage(tmp_path / "new"):
        pytest.fail("there is no folder")


def test_what_a_killed_run_left_goes_and_what_a_living_one_fills_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "new")]
    assert subprocess.run([*command, "die"], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / ".new.mlx-audit-99999999").mkdir()  # killed before it had a lock
    (tmp_path / ".new.mlx-audit-notes").mkdir()  # somebody else's
    (tmp_path / ".newer.mlx-audit-1").mkdir()
    with subprocess.Popen([*command, "wait"], stdout=subprocess.PIPE) as living:
        try:
            assert living.stdout is not None
            living.stdout.readline()
            assert not left.exists()
            with stage(tmp_path / "new"):
                there = {path.name for path in tmp_path.iterdir()}
        finally:
            living.kill()
    assert there == {
        *(".new.mlx-audit-notes", ".newer.mlx-audit-1"),
        *(f".new.mlx-audit-{living.pid}", f".new.mlx-audit-{os.getpid()}"),
    }
