"""What the loader accepts and refuses beyond the files in broken/."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import ManifestError, find_manifest, load_manifest, load_manifests
from mlx_audit.manifests.yaml_nodes import MAX_BYTES, MAX_PROBLEMS

GOOD = """\
family: sample
module: mlx_lm.models.llama
about: A manifest for tests.
sources: [mlx_lm/models/llama.py]
topology:
  count: len(layer_types)
  layers:
    - {cache: linear}
variants:
  full:
    exactness: exact
    tiny: {hidden_size: 32, rms_norm_eps: 1e-5}
    claims: {compiled_decode: capable}
"""


def write(folder: Path, text: str, name: str = "sample.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refuse(folder: Path, text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load_manifest(write(folder, text))
    return [f"{problem.line}:{problem.column}: {problem.what}" for problem in caught.value.problems]


def test_a_good_manifest_loads(tmp_path: Path) -> None:
    manifest = load_manifest(write(tmp_path, GOOD))
    assert manifest.path == tmp_path / "sample.yaml"
    assert (manifest.family, manifest.arguments) == ("sample", "args")
    assert manifest.variants["full"].tiny == {"hidden_size": 32, "rms_norm_eps": 1e-5}
    assert manifest.requires == {}


def test_shipped_manifests_load_in_order() -> None:
    manifests = load_manifests()
    paths = [manifest.path for manifest in manifests]
    assert paths == sorted(paths)
    assert {"llama", "qwen2"} <= {manifest.family for manifest in manifests}


def test_find_by_family_and_by_module() -> None:
    found = find_manifest("mlx_lm.models.qwen2")
    assert found is not None
    assert found.family == "qwen2"
    llama = find_manifest("llama")
    assert llama is not None
    assert llama.module == "mlx_lm.models.llama"
    assert find_manifest("no_such_family") is None


def test_a_second_manifest_of_a_family_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "a.yaml")
    write(
        tmp_path, "# copied\n" + GOOD.replace(".llama", ".qwen2").replace("len(layer_types)", "4"), "b.yaml"
    )
    with pytest.raises(ManifestError, match=r"b\.yaml:2:9: another manifest has this family") as caught:
        load_manifests(tmp_path)
    assert len(caught.value.problems) == 1


def test_problems_of_all_files_are_raised_together(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("exactness: exact", "exactness: no"), "a.yaml")
    write(tmp_path, GOOD.replace("linear", "liner"), "b.yaml")
    with pytest.raises(ManifestError) as caught:
        load_manifests(tmp_path)
    assert [Path(problem.file).name for problem in caught.value.problems] == ["a.yaml", "b.yaml"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MlxAuditError, match="no such folder"):
        load_manifests(tmp_path / "absent")


def test_size_is_bounded(tmp_path: Path) -> None:
    assert load_manifest(write(tmp_path, GOOD + "#" * (MAX_BYTES - len(GOOD)))).family == "sample"
    assert refuse(tmp_path, GOOD + "#" * (MAX_BYTES - len(GOOD) + 1)) == ["1:1: the file is too large"]


def test_the_number_of_problems_is_bounded(tmp_path: Path) -> None:
    names = ", ".join(f"absent{at}" for at in range(MAX_PROBLEMS * 2))
    assert len(refuse(tmp_path, GOOD + f"configurations: [{names}]\n")) == MAX_PROBLEMS


def test_nesting_is_bounded(tmp_path: Path) -> None:
    for brackets, message in ((16, None), (17, "not YAML: nested more than 20 levels deep")):
        text = GOOD.replace("hidden_size: 32", f"hidden_size: {'[' * brackets}{']' * brackets}")
        if message is None:
            load_manifest(write(tmp_path, text))
        else:
            assert refuse(tmp_path, text)[0].endswith(message)


def test_a_configuration_cannot_escape_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "manifests"
    (folder / "configurations").mkdir(parents=True)
    (folder / "configurations" / "inside.json").write_text("{}")
    (folder / "configurations" / "link.json").symlink_to(tmp_path / "secret.json")
    assert load_manifest(write(folder, GOOD + "configurations: [inside]\n")).configurations == ["inside"]
    assert refuse(folder, GOOD + "configurations: [link]\n") == [
        "14:18: the configuration lies outside its folder"
    ]


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", "", "a\0b"])
def test_configuration_path_refuses_other_folders(tmp_path: Path, name: str) -> None:
    manifest = load_manifest(write(tmp_path, GOOD))
    assert manifest.configuration_path("x").parent == tmp_path / "configurations"
    with pytest.raises(MlxAuditError, match="outside its folder"):
        manifest.configuration_path(name)


def test_a_module_beside_the_manifest_is_read_but_not_run(tmp_path: Path) -> None:
    source = "from dataclasses import dataclass\nraise SystemExit\n\n@dataclass\nclass ModelArgs:\n    depth: int\n"
    (tmp_path / "own.py").write_text(source)
    text = GOOD.replace("mlx_lm.models.llama", "./own.py").replace(
        "hidden_size: 32, rms_norm_eps: 1e-5", "depth: 2"
    )
    assert load_manifest(write(tmp_path, text.replace("len(layer_types)", "depth"))).module == "./own.py"
    assert refuse(tmp_path, text.replace("len(layer_types)", "dept")) == ["6:10: unknown name"]


def test_mistakes_of_every_sort_are_reported_in_one_run(tmp_path: Path) -> None:
    text = GOOD.replace("llama\n", "lama\n").replace("exactness: exact", "exactness: exact\n    limits: [x]")
    text = text.replace("family: sample", "famly: sample")
    assert refuse(tmp_path, text + "configurations: [absent]\n") == [
        "1:1: the key 'family' is missing",
        "1:1: unknown key",
        "2:9: no such module",
        "14:31: a capable claim has limits",
        "15:18: no such configuration",
    ]


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_manifest_errors(data: bytes) -> None:
    _load_or_refuse(data)


_LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [*GOOD.splitlines(), "  - {cache: linear}", "rope: [{dynamic: undecided}]", "? [a]", "- - -"]
        ),
        st.text(st.characters(codec="utf-8"), max_size=30),
    ),
    max_size=20,
)


@given(_LINES)
def test_random_lines_raise_only_manifest_errors(lines: list[str]) -> None:
    _load_or_refuse("\n".join(lines).encode())


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("abi[]()'=<. +-", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["when", "cache", "of", "x"]), inner)
    ),
    max_leaves=6,
)


@given(st.sampled_from(GOOD.splitlines()), _VALUES)
def test_any_value_under_any_key_raises_only_manifest_errors(line: str, value: object) -> None:
    import json

    key = line.split(":")[0].replace("- {cache", "- cache")
    _load_or_refuse(GOOD.replace(line, f"{key}: {json.dumps(value)}").encode())


def _load_or_refuse(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".yaml") as stream:
        stream.write(data)
        stream.flush()
        try:
            load_manifest(Path(stream.name))
        except ManifestError as error:
            assert error.problems
            assert all(problem.line >= 1 and problem.column >= 1 for problem in error.problems)
