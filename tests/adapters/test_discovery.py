"""Which adapter serves a model, and that no record vouches for another one than it was made with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import Install
from adapters.distributions import PLAIN, forget, write_distribution
from command import environment, mlx_audit
from mlx_audit.adapters import GenericAdapter, adapter_for
from mlx_audit.decode import CompiledDecodeSession
from mlx_audit.errors import NotCompileCapable
from mlx_audit.evidence import registered
from mlx_audit.evidence.records import current_digests, load_record
from mlx_audit.evidence.standing import record_state
from mlx_audit.manifests import find_manifest, load_manifest
from mlx_audit.models.modules import FILE_PREFIX
from mlx_audit.resources import model_audits
from proved import write_proof
from tiny_models import tiny_model, tokens

QWEN2 = "mlx_lm.models.qwen2"


def refusal(model: Any) -> str:
    """Return why no adapter serves a model, whatever is asked for; the generic one is never put in its place."""
    texts = set()
    for evidence in ("ignore", "required"):
        with pytest.raises(NotCompileCapable) as caught:
            adapter_for(model, evidence=evidence)  # type: ignore[arg-type]
        texts.add(str(caught.value))
    (text,) = texts
    return text


def test_the_registered_adapter_serves_its_module_and_no_other(install: Install) -> None:
    install("acme", {"acme_adapter.py": PLAIN}, {QWEN2: "acme_adapter:Adapter"})
    for evidence in ("ignore", "required"):
        adapter: Any = adapter_for(tiny_model("qwen2"), evidence=evidence)  # type: ignore[arg-type]
        assert type(adapter).__module__ == "acme_adapter"
        assert isinstance(adapter_for(tiny_model("llama"), evidence=evidence), GenericAdapter)  # type: ignore[arg-type]
    session = CompiledDecodeSession(tiny_model("qwen2"), 8, evidence="ignore")
    assert type(session._provider).__module__ == "acme_adapter"
    session.prefill([tokens(3)])
    assert session.step([1]).shape == (1, 64)


def test_a_model_of_ones_own_module(install: Install) -> None:
    source = PLAIN + "\n\nfrom mlx_lm.models import qwen2\n\n\nclass Model(qwen2.Model):\n    pass\n"
    install("acme", {"acme_model.py": source}, {"acme_model": "acme_model:Adapter"})
    model = tiny_model("qwen2")
    model.__class__ = import_module("acme_model").Model
    assert type(adapter_for(model)).__name__ == "Adapter"
    with pytest.raises(NotCompileCapable, match="no manifest declares this model"):
        CompiledDecodeSession(model, 8)


def test_a_models_own_caches_go_before_a_registered_adapter(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", {"acme_adapter.py": PLAIN}, {QWEN2: "acme_adapter:Adapter"})
    model = tiny_model("qwen2")
    own = GenericAdapter(model).new_fixed_capacity_cache
    monkeypatch.setattr(type(model), "new_fixed_capacity_cache", staticmethod(own), raising=False)
    assert adapter_for(model) is model


def test_two_adapters_for_one_module_are_refused_by_name(install: Install) -> None:
    install("acme", {"acme_adapter.py": PLAIN}, {QWEN2: "acme_adapter:Adapter"})
    install("other", {"other_adapter.py": PLAIN}, {QWEN2: "other_adapter:Adapter"})
    text = refusal(tiny_model("qwen2"))
    assert "several adapters" in text
    assert "acme_adapter:Adapter of acme" in text
    assert "other_adapter:Adapter of other" in text
    assert isinstance(adapter_for(tiny_model("llama")), GenericAdapter)
    manifest = find_manifest("qwen2")
    assert manifest is not None
    assert "several adapters" in record_state(manifest, "full")


BROKEN = {
    "import": ("import no_such_module_at_all\n" + PLAIN, "no_such_module_at_all"),
    "syntax": ("class Adapter(:\n", "SyntaxError"),
    "exit": ("raise SystemExit(3)\n", "SystemExit: 3"),
    "no class": ("VALUE = 1\n", "Adapter"),
    "constructor": (
        "class Adapter:\n    def __init__(self, model):\n        raise ValueError('too wide')\n",
        "ValueError: too wide",
    ),
    "no method": (
        "class Adapter:\n    def __init__(self, model):\n        pass\n",
        "Adapter has no method new_fixed_capacity_cache",
    ),
    "of elsewhere": (
        PLAIN + "\n\nfrom textwrap import dedent\n\nAdapter.new_fixed_capacity_cache = dedent\n",
        "which its digest does not cover",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_adapter_that_cannot_be_used_is_never_replaced(case: str, install: Install) -> None:
    source, reason = BROKEN[case]
    install("acme", {"acme_adapter.py": source}, {QWEN2: "acme_adapter:Adapter"})
    text = refusal(tiny_model("qwen2"))
    assert "acme_adapter:Adapter of acme" in text
    assert reason in text


@pytest.mark.parametrize(
    "value", ["acme_nowhere:Adapter", "acme.deep.nowhere:Adapter", "no entry point at all!"]
)
def test_an_adapter_that_is_not_there_is_refused(value: str, install: Install) -> None:
    install("acme", {"acme/__init__.py": ""}, {QWEN2: value})
    text = refusal(tiny_model("qwen2"))
    assert value in text
    assert "cannot be read" in text


def digest() -> str | None:
    forget()
    manifest = find_manifest("qwen2")
    assert manifest is not None
    return current_digests(manifest).get("adapter")


def test_the_digest_covers_what_an_adapter_imports_of_its_own_package(install: Install) -> None:
    files = {
        "acme/__init__.py": "from . import plain\n",
        "acme/adapters/__init__.py": "",
        "acme/adapters/qwen2.py": "from ..caches import Adapter\n",
        "acme/caches.py": PLAIN,
        "acme/plain.py": "import acme.deep.below\n",
        "acme/deep/below.py": "WIDTH = 1\n",
        "acme/unused.py": "WIDTH = 1\n",
    }
    assert digest() is None
    site = install("acme", files, {QWEN2: "acme.adapters.qwen2:Adapter"})
    first = digest()
    assert first is not None
    assert "acme.adapters" not in sys.modules, "a digest imports nothing"
    assert type(adapter_for(tiny_model("qwen2"))).__module__ == "acme.caches"

    for path in ("acme/caches.py", "acme/deep/below.py", "acme/__init__.py"):
        file = site / path
        file.write_text(file.read_text() + "# a comment\n")
        assert digest() == first, path
        file.write_text(file.read_text() + "OTHER = 2\n")
        assert digest() != first, path
        first = digest()
    (site / "acme" / "unused.py").write_text("WIDTH = 2\n")
    assert digest() == first
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(
        f"[mlx_audit.adapters]\n{QWEN2} = acme.adapters.qwen2:Other\n"
    )
    assert digest() != first, "another class of the same files"


def test_a_record_vouches_for_the_adapter_that_it_was_made_with(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generic = write_proof(tmp_path / "generic", "qwen2")
    assert isinstance(
        CompiledDecodeSession(tiny_model("qwen2"), 8, records=generic)._provider, GenericAdapter
    )
    with monkeypatch.context() as patch:
        site = install("acme", {"acme_adapter.py": PLAIN}, {QWEN2: "acme_adapter:Adapter"})
        with pytest.raises(
            NotCompileCapable, match=r"record is stale; found: the adapter of .* changed since"
        ):
            CompiledDecodeSession(tiny_model("qwen2"), 8, records=generic)
        special = write_proof(tmp_path / "special", "qwen2")
        session = CompiledDecodeSession(tiny_model("qwen2"), 8, records=special)
        assert type(session._provider).__module__ == "acme_adapter"
        (site / "acme_adapter.py").write_text(PLAIN.replace("batch_size)", "max(1, batch_size))"))
        with pytest.raises(NotCompileCapable, match=r"the adapter of .* changed since"):
            CompiledDecodeSession(tiny_model("qwen2"), 8, records=special)
        patch.setattr(sys, "path", [path for path in sys.path if path != str(site)])
        forget()
        with pytest.raises(NotCompileCapable, match=r"the adapter of .* changed since"):
            CompiledDecodeSession(tiny_model("qwen2"), 8, records=special)
        CompiledDecodeSession(tiny_model("qwen2"), 8, records=generic)


def test_the_record_of_a_model_file_vouches_for_no_registered_adapter(
    install: Install, tmp_path: Path
) -> None:
    """An audit imports the file under a name of its own, for which nobody can register."""
    source = PLAIN + "\n\nfrom mlx_lm.models import qwen2\n\nModelArgs = qwen2.ModelArgs\n"
    source += "\n\nclass Model(qwen2.Model):\n    pass\n"
    site = install("acme", {"acme_model.py": source}, {})
    text = (model_audits() / "qwen2.yaml").read_text().replace("family: qwen2", "family: acme")
    text = text[: text.index("configurations:")].replace(QWEN2, "./acme_model.py")
    (site / "acme.yaml").write_text(text)
    proof = write_proof(tmp_path / "proof", load_manifest(site / "acme.yaml"))
    model = tiny_model("qwen2")
    model.__class__ = import_module("acme_model").Model
    assert isinstance(CompiledDecodeSession(model, 8, records=proof)._provider, GenericAdapter)

    own_names = [f"{FILE_PREFIX}acme_model", "acme_model"]
    install("other", {}, dict.fromkeys(own_names, "acme_model:Adapter"))
    with pytest.raises(NotCompileCapable, match="made without the adapter that is registered for acme_model"):
        CompiledDecodeSession(model, 8, records=proof)
    assert registered.registered_adapter("acme_model") is not None
    assert registered.registered_adapter(own_names[0]) is None


def test_shipped_records_know_no_adapter() -> None:
    """Their key is as it was before adapters could be registered."""
    for manifest in map(find_manifest, ("qwen2", "gpt_oss")):
        assert manifest is not None
        assert set(current_digests(manifest)) == {"model", "toolkit", "manifest"}


def test_a_method_that_was_put_on_a_models_class_is_no_code_of_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = write_proof(tmp_path, "qwen2")
    model = tiny_model("qwen2")
    CompiledDecodeSession(model, 8, records=proof)

    def foreign(self: Any, max_tokens: int, *, batch_size: int = 1) -> list[Any]:
        return GenericAdapter(self).new_fixed_capacity_cache(max_tokens, batch_size=batch_size)

    own = GenericAdapter(model).new_fixed_capacity_cache
    for value in (foreign, staticmethod(own), own):
        monkeypatch.setattr(type(model), "new_fixed_capacity_cache", value, raising=False)
        with pytest.raises(NotCompileCapable, match=r"does not speak of; found: .*new_fixed_capacity_cache"):
            CompiledDecodeSession(model, 8, records=proof)
        assert CompiledDecodeSession(model, 8, evidence="ignore").capacity == 8


def test_installed_distributions_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = metadata.entry_points
    monkeypatch.setattr(registered, "entry_points", lambda **group: looks.append(group) or look(**group))
    forget()
    for _ in range(3):
        CompiledDecodeSession(tiny_model("qwen2"), 8, evidence="ignore")
    assert looks == [{"group": "mlx_audit.adapters"}]
    forget()


SCRIPT = """
import json
from mlx_audit import CompiledDecodeSession
from tiny_models import tiny_model
from proved import write_proof
from pathlib import Path

session = CompiledDecodeSession(tiny_model("qwen2"), 8, records=write_proof(Path("proof"), "qwen2"))
print(json.dumps([type(session._provider).__module__]))
"""


def test_sessions_and_audits_of_other_processes_use_the_installed_adapter(tmp_path: Path) -> None:
    site = write_distribution(tmp_path, "acme", {"acme_adapter.py": PLAIN}, {QWEN2: "acme_adapter:Adapter"})
    tests = Path(__file__).parents[1]
    path = [str(site), str(tests), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        env=environment(env),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["acme_adapter"]
    recorded = load_record(next((tmp_path / "proof" / "qwen2").iterdir()))
    assert "adapter" in recorded.digests

    audited = mlx_audit("run", "qwen2", "--only", "TRC001", "--json", "-", env=env)
    results = json.loads(audited.stdout)["results"]
    assert {result["digests"]["adapter"] for result in results} == {recorded.digests["adapter"]}
    (site / "acme_adapter.py").write_text(
        PLAIN.replace("return allocate", "raise ValueError\n        return allocate")
    )
    audited = mlx_audit("run", "qwen2", "--only", "TRC001", "--json", "-", env=env)
    assert audited.returncode != 0
    assert "ValueError" in audited.stdout
