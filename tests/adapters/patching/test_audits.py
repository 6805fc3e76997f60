"""What has no fixed-capacity caches as it is, is capable once it is patched: the whole audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import results_of
from mlx_audit.adapters.patching import patch_source
from patched_families import CONFIGURATIONS, write_configuration
from tiny_models import module_of


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(CONFIGURATIONS))
def test_a_patched_family_passes_every_check(tmp_path: Path, family: str) -> None:
    source = Path(str(module_of(family).__file__))
    patched = patch_source(source, f"mlx_lm.models.{family}")
    file = tmp_path / f"{family}.py"
    file.write_text(patched.after)
    configuration = write_configuration(tmp_path, family)
    code, (result,) = results_of(file, "--config", configuration)
    assert (code, result.verdict) == (0, "capable"), [c for c in result.checks if c.status != "pass"]
    code, (result,) = results_of(source, "--config", configuration)
    assert (code, result.verdict) == (1, "not-capable")
