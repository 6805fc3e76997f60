"""Which files a patch touches."""

from __future__ import annotations

from pathlib import Path

from mlx_audit.audit.patches import make_patch
from mlx_audit.evidence.results import CheckResult, Result
from mlx_audit.models.target import Target
from tiny_models import module_of


def found_at(*places: str) -> list[Result]:
    """What a static audit says that found the position read on the host at these places."""
    check = CheckResult(
        code="SRC001",
        name="name",
        tier="static",
        status="fail",
        where=places[0],
        figures={"more_places": [f"{place} kind: what" for place in places[1:]]},
    )
    return [
        Result(target="t", family="t", variant="v", configuration="c", verdict="undecided", checks=[check])
    ]


def test_a_file_in_a_checkout_of_mlx_lm_is_patched_itself_and_not_the_installed_one(tmp_path: Path) -> None:
    file = tmp_path / "mlx_lm" / "models" / "gpt_bigcode.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        Path(module_of("gpt_bigcode").__file__ or "").read_text(encoding="utf-8"), encoding="utf-8"
    )
    target = Target(str(file), "file", "gpt_bigcode", None, file=file)
    places = ("mlx_lm/models/gpt_bigcode.py:150:37", "mlx_lm/models/rope_utils.py:260:19")
    patch = make_patch(target, found_at(*places))
    assert [source.path.name for source in patch.sources] == ["gpt_bigcode.py", "rope_utils.py"]
    assert patch.sources[0].path == file.resolve()
    with patch.written() as overlay:
        assert list(overlay) == [str(file.resolve()), "mlx_lm.models.rope_utils"]


def test_a_family_is_patched_with_the_helpers_that_its_configuration_reaches() -> None:
    target = Target("llama", "family", "llama", None, module="mlx_lm.models.llama")
    for places, names in (
        (("mlx_lm/models/rope_utils.py:260:19",), ["llama.py", "rope_utils.py"]),
        (("mine.py:1:1",), ["llama.py"]),
    ):
        assert [s.path.name for s in make_patch(target, found_at(*places)).sources] == names
