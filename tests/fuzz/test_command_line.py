"""The corpus, and links, pipes and devices, through the command line: one line that says what is wrong, and exit 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from command import environment, mlx_audit
from fuzz.child import CORPUS, contents
from fuzz.parsers import PARSERS, ggufs
from mlx_audit import resources
from mlx_audit.manifests import load_configuration, load_manifest
from mlx_audit.models.target import resolve_target

CHILD = Path(__file__).with_name("command_child.py")
MOST_BYTES = 1 << 30


@dataclass
class Place:
    """A folder of hostile files."""

    folder: Path

    def of(self, parser: str, name: str, file: str | None = None) -> str:
        """Return the path of a file of the corpus, under the name that its reader wants."""
        source = CORPUS / parser / name
        target = self.folder / parser / name.split(".")[0] / (file or PARSERS[parser].file)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(contents(source))
        return str(target)

    def checkpoint(self, parser: str, name: str) -> str:
        """Return a folder of a model with this file of the corpus in it, and all else as it should be."""
        file = {"weights": "model.safetensors"}.get(parser)
        folder = Path(self.of(parser, name, file)).parent
        config = resources.model_audits() / "configurations" / "TinyLlama--TinyLlama-1.1B-Chat-v1.0.json"
        for name, data in (("config.json", config.read_bytes()), ("model.safetensors", b"")):
            if not (folder / name).exists():
                (folder / name).write_bytes(data)
        return str(folder)

    def special(self, kind: str, suffix: str) -> str:
        """Return something that is no file: a pipe without a writer, a loop, a device, a folder, or a link to one."""
        path = self.folder / f"{kind}{suffix}"
        if not path.is_symlink() and not path.exists():
            match kind:
                case "pipe":
                    os.mkfifo(path)
                case "loop":
                    path.symlink_to(path)
                case "device":
                    path.symlink_to("/dev/zero")
                case "folder":
                    path.mkdir()
                case "linked":
                    path.symlink_to(self.special("pipe", suffix))
                case "dangling":
                    path.symlink_to(self.folder / "absent")
        return str(path)


SPECIAL = ("pipe", "loop", "device", "folder", "linked", "dangling")


def cases(place: Place) -> dict[str, tuple[list[str], set[int]]]:
    """Return command lines by name, each with the exit codes that are right."""
    found: dict[str, tuple[list[str], set[int]]] = {}

    def add(name: str, *arguments: str, codes: tuple[int, ...] = (2,)) -> None:
        assert name not in found
        found[name] = (list(arguments), set(codes))

    for file in sorted((CORPUS / "manifest").iterdir()):
        if not file.name.startswith("value"):
            add(f"validate {file.name}", "validate", place.of("manifest", file.name))
    for name in ("billion-laughs.yaml", "path-in-module.yaml", "emoji-family.yaml", "deep-lists.bomb"):
        add(f"run {name}", "run", "--tier", "static", place.of("manifest", name))
    for name in ("nan.json", "deep-lists.bomb", "duplicate-key.json", "path-in-type.json", "utf-16.json"):
        add(f"inspect {name}", "inspect", "llama", "--config", place.of("configuration", name))
        add(f"draft {name}", "draft", "llama", "--config", place.of("configuration", name))
    for name in (
        "mistakes-without-end.bomb",
        "lists-of-lists.bomb",
        "surrogate.json",
        "utf-16.json",
        "null.json",
    ):
        add(f"report {name}", "report", place.of("results", name))
        add(
            f"bench {name}",
            "bench",
            "--svg",
            str(place.folder / "out.svg"),
            "--from",
            place.of("results", name),
        )
    for name in ("mistakes-without-end.bomb", "deep-lists.bomb", "surrogate.json"):
        folder = Path(place.of("record", name, "llama/cpu.json")).parents[1]
        add(f"gate {name}", "gate", "llama", "--backend", "cpu", "--records", str(folder), codes=(1, 2))
    for name in (
        "length-2-63.safetensors",
        "overlap.safetensors",
        "deep.bomb",
        "dtype-is-a-list.safetensors",
    ):
        add(f"convert {name}", "convert", place.checkpoint("weights", name), str(place.folder / "out"))
    for name in ("counts-2-63.gguf", "array-of-arrays.gguf", "empty.gguf"):
        add(f"convert {name}", "convert", place.of("gguf", name), str(place.folder / "out"))
        add(f"generate {name}", "generate", "--prompt", "x", "--model", place.of("gguf", name))
    add(
        "bench deep",
        "bench",
        "--svg",
        str(place.folder / "out.svg"),
        "--from",
        place.of("results", "deep-lists.bomb"),
    )
    for kind in ("pipe", "device", "folder", "linked", "loop"):
        add(f"schema {kind}", "schema", "--check", place.special(kind, ".json"))
        add(f"adapt {kind}", "adapt", "llama", "--check", place.special(kind, ".py"))
    for kind in SPECIAL:
        add(f"validate {kind}", "validate", place.special(kind, ".yaml"))
        add(f"inspect {kind}", "inspect", "llama", "--config", place.special(kind, ".json"))
        add(f"report {kind}", "report", place.special(kind, ".json"))
    for kind in ("pipe", "loop", "device"):
        add(f"run {kind}", "run", place.special(kind, ".gguf"))
        config = place.of("configuration", "value-infinity.json")
        add(f"inspect {kind} model", "inspect", place.special(kind, ".py"), "--config", config)
    for name in (
        "../llama",
        "llama/../llama",
        "\u202eamall",
        "ＬＬＡＭＡ",
        "llama\n",
        "-",
        "%s",
        "$(id)",
        "a" * 300,
        "👩‍👩‍👧",
    ):
        add(f"adapt the name {name[:20]!r}", "adapt", "--", name)
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("hostile")
    lines = cases(Place(folder))
    ran = subprocess.run(
        [sys.executable, CHILD],
        input=json.dumps([arguments for arguments, _ in lines.values()]),
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    told = json.loads(ran.stdout)
    return {"lines": lines, **told, "left": sorted(path.name for path in folder.glob(".*"))}


def test_hostile_inputs_end_with_their_code_and_one_reason(done: dict[str, object]) -> None:
    lines: dict[str, tuple[list[str], set[int]]] = done["lines"]  # type: ignore[assignment]
    outcomes: list[dict[str, object]] = done["outcomes"]  # type: ignore[assignment]
    assert len(lines) == len(outcomes) > 100
    wrong = {
        name: (outcome["code"], outcome["strange"] or outcome["text"])
        for (name, (_, codes)), outcome in zip(lines.items(), outcomes, strict=True)
        if outcome["code"] not in codes
        or outcome["strange"]
        or "Traceback" in str(outcome["text"])
        or "internal error" in str(outcome["text"])
        or "\x1b" in str(outcome["text"])
    }
    assert not wrong, "\n\n".join(f"{name}: {what}" for name, what in wrong.items())


def test_hostile_inputs_take_little_memory_and_time(done: dict[str, object]) -> None:
    assert done["peak"] < MOST_BYTES  # type: ignore[operator]
    slow = [
        (name, outcome["seconds"])
        for name, outcome in zip(done["lines"], done["outcomes"], strict=True)  # type: ignore[call-overload]
        if outcome["seconds"] > 10
    ]
    assert not slow
    assert done["left"] == [], "temporary files were left behind"


@pytest.mark.parametrize("name", ["validate pipe", "report mistakes-without-end.bomb"])
def test_a_process_of_its_own_says_the_same(name: str, tmp_path: Path) -> None:
    arguments, codes = cases(Place(tmp_path))[name]
    ran = mlx_audit(*arguments)
    assert ran.returncode in codes
    assert "Traceback" not in ran.stderr
    assert ran.stderr


def test_paths_in_manifests_stay_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    (folder / "configurations").mkdir(parents=True)
    outside = tmp_path / "outside.py"
    outside.write_text("raise SystemExit('run')\n")
    (folder / "model.py").symlink_to(outside)
    (tmp_path / "secret.json").write_text('{"model_type": "llama"}')
    (folder / "configurations" / "secret.json").symlink_to(tmp_path / "secret.json")
    text = (CORPUS / "manifest" / "value-small.yaml").read_text()
    manifest = folder / "x.yaml"
    for more, says in (
        (text.replace("mlx_lm.models.llama", "./model.py"), "outside the manifest's folder"),
        (text + "configurations: [secret]\n", "outside its folder"),
    ):
        manifest.write_text(more)
        ran = mlx_audit("run", "--tier", "static", manifest)
        assert ran.returncode == 2
        assert says in ran.stderr


def test_seeds_are_what_the_command_line_takes(tmp_path: Path) -> None:
    """The files that the others are made of are fine: what is refused is refused for its harm."""
    (tmp_path / "model.gguf").write_bytes(ggufs()[0])
    assert resolve_target(str(tmp_path / "model.gguf")).family == "llama"
    load_manifest(CORPUS / "manifest" / "value-small.yaml")
    load_configuration(CORPUS / "configuration" / "value-infinity.json")
