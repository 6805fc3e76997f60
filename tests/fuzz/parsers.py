"""Every reader of files that anybody may have written: what it is given, and what is done with what it returns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzz.mutations import of_bytes, of_trees
from mlx_audit import resources
from mlx_audit.manifests.expressions import parse

AUDITS = resources.model_audits()


@dataclass(frozen=True)
class Parser:
    """A reader.

    Attributes:
        file: Name of the file that inputs are written to, in a folder of their own.
        read: Reads that file and uses what it says; what it refuses, it refuses by a typed error.
        seeds: Returns real inputs; all of them are accepted.
        inputs: Returns the strategy that grows inputs from them.
    """

    file: str
    read: Callable[[Path], object]
    seeds: Callable[[], Sequence[bytes]]
    inputs: Callable[[Sequence[bytes]], st.SearchStrategy[bytes]]


def read_manifest(path: Path) -> None:
    from mlx_audit.manifests import load_manifest

    manifest = load_manifest(path)
    for variant in manifest.variants.values():
        manifest.variant_for(variant.tiny)
        manifest.cache_specs(variant.tiny)
        manifest.layer_specs(variant.tiny)


def manifests() -> list[bytes]:
    return [(AUDITS / f"{name}.yaml").read_bytes() for name in ("mamba2", "gpt_oss", "gemma3_text")]


def manifest_inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    # JSON is YAML: trees are written as JSON.
    return st.one_of(of_bytes(seeds), of_trees([json.dumps(yaml.safe_load(seed)).encode() for seed in seeds]))


def read_expression(path: Path) -> None:
    from mlx_audit.manifests.evaluation import evaluate

    names = {"i": 1, "layer_types": ["a", "b"], "window": 8, "ratio": 0.5, "none": None, "deep": {"a": [1]}}
    expression = parse(path.read_bytes().decode("utf-8", errors="replace"))
    evaluate(expression, names)


def expressions() -> list[bytes]:
    return [
        b"layer_types[i] == 'a' and window > 4 or not i in [1, 2, -3]",
        b"len(layer_types) - 1 // 2 % 3 + window",
        b"deep['a'][0] != none",
    ]


def read_configuration(path: Path) -> None:
    from mlx_audit.manifests import load_configuration
    from mlx_audit.models.target import mlx_lm_module

    mlx_lm_module(load_configuration(path), where=str(path))


def configurations() -> list[bytes]:
    found = sorted((AUDITS / "configurations").glob("*.json"), key=lambda path: path.stat().st_size)
    return [path.read_bytes() for path in found if b'"model_type"' in path.read_bytes()][:3]


def read_results(path: Path) -> None:
    from mlx_audit.evidence.results_file import load_results

    documents = [load_results(path)]
    for writer in ("markdown", "junit", "sarif", "html"):
        text = import_module(f"mlx_audit.reports.{writer}").render(documents)
        assert writer != "html" or "<script>alert" not in text
        text.encode()


def results() -> list[bytes]:
    from mlx_audit.evidence.recorded import record_results
    from mlx_audit.evidence.records import load_record
    from mlx_audit.manifests import load_manifest

    found = []
    for family in ("mamba2", "baichuan_m1"):
        record = load_record(AUDITS / "records" / family / "cpu.json")
        found.append(record_results(record, load_manifest(AUDITS / f"{family}.yaml")).to_json().encode())
    return found


def read_record(path: Path) -> None:
    from mlx_audit.evidence.recorded import record_results
    from mlx_audit.evidence.records import lapse, load_record
    from mlx_audit.manifests import load_manifest

    record = load_record(path)
    manifest = load_manifest(AUDITS / "mamba2.yaml")
    for variant in record.variants.values():
        variant.verdict()
        variant.conditions()
        variant.proves_rope("yarn", "tiny")
    reasons = lapse(record, manifest, mlx_version=version("mlx")).reasons
    record_results(record, manifest, reasons).to_json()
    record.to_json().encode()


def records() -> list[bytes]:
    return [(AUDITS / "records" / "mamba2" / f"{backend}.json").read_bytes() for backend in ("cpu", "cuda")]


def redigested(tree: Any) -> Any:
    """Return a record or stamp whose self-digest is right again, as a forger would."""
    if not isinstance(tree, dict):
        return tree
    rest = {key: value for key, value in tree.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False)
    return {**rest, "digest": f"sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"}


def of_digested(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return of_trees(seeds, redigested)


def read_stamp(path: Path) -> None:
    from mlx_audit.convert.model_card import write_card
    from mlx_audit.evidence.stamps import check_stamp, load_stamp

    stamp = load_stamp(path.parent)
    if stamp is not None:
        stamp.to_json().encode()
        check_stamp(path.parent)
        write_card(stamp, path.parent)
        (path.parent / "README.md").unlink(missing_ok=True)


def stamps() -> list[bytes]:
    from mlx_audit.evidence.stamps import Stamp, StampedCheck, StampedFile

    files = {"model.safetensors": StampedFile(bytes=0, sha256=hashlib.sha256(b"").hexdigest())}
    checks = [
        StampedCheck(code="TRC001", tier="trace", status="pass"),
        StampedCheck(code="CKP001", tier="checkpoint", status="not-run", reason="none"),
    ]
    stamp = Stamp(
        family="llama",
        module="mlx_lm.models.llama",
        variant="full",
        verdict="undecided",
        reason="a | b",
        limits=["one"],
        backend="cpu",
        mlx="0.32",
        profile="ci",
        seed=0,
        digests={"model": "sha256:0"},
        checks=checks,
        files=files,
        check_again="mlx-audit run .",
    )
    return [stamp.to_json().encode()]


def read_card(path: Path) -> None:
    """A model card that the section and the tag are put into."""
    from mlx_audit.convert.model_card import BEGIN, END, edited

    edited(path.read_bytes().decode("utf-8", errors="replace"), f"{BEGIN}\nsection\n{END}\n")


def cards() -> list[bytes]:
    return [
        b"---\nlicense: mit\ntags: [a, b]\ndate: 2024-01-01\n---\n\n# Model\n",
        (
            b"---\ntags:\n- a\n  # comment\n- b\nn: {a: 1, b: [1, 2]}\n---\ntext\n"
            b"<!-- mlx-audit: begin -->\n<!-- mlx-audit: end -->\n"
        ),
    ]


def read_weights(path: Path) -> None:
    from mlx_audit.convert.safetensors_header import read_weights_header

    read_weights_header(path)


def weights() -> list[bytes]:
    header = {
        "__metadata__": {"format": "mlx"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    }
    return [packed(header)]


def packed(tree: Any) -> bytes:
    """Return a safetensors file with this header, and 16 bytes of data."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


def weight_inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(of_bytes(seeds), of_trees([seed[8:-16] for seed in seeds]).map(packed))


def read_gguf_header(path: Path) -> None:
    from mlx_audit.models.gguf_checked import read_checked
    from mlx_audit.models.gguf_tokenizer import read_vocabulary

    header, _, _ = read_checked(path)
    read_vocabulary(header)


def ggufs() -> list[bytes]:
    import gguf_files as gf
    from tiny_models import tiny_model

    model = tiny_model("llama", vocab_size=gf.VOCABULARY, num_hidden_layers=1, tie_word_embeddings=True)
    return [gf.draft_of(model, {"attn": gf.KIND_Q4_1, "token_embd": gf.KIND_Q8_0}).build()]


def read_known(path: Path) -> None:
    from mlx_audit.audit.known_failures import read_known_failures

    read_known_failures(path)


def known() -> list[bytes]:
    return [b"# a list\n\nllama::full::TRC001  # it is known\nllama::full::verdict # so is this\n"]


def read_python(path: Path) -> None:
    from mlx_audit.source.reading import read_source

    report = read_source(path)
    assert "internal error" not in report.unreadable, report.unreadable


def models() -> list[bytes]:
    folder = (
        Path(str(import_module("importlib.util").find_spec("mlx_lm").submodule_search_locations[0]))
        / "models"
    )
    return [(folder / f"{name}.py").read_bytes() for name in ("mamba2", "llama")]


PARSERS: dict[str, Parser] = {
    "manifest": Parser("manifest.yaml", read_manifest, manifests, manifest_inputs),
    "expression": Parser("expression.txt", read_expression, expressions, of_bytes),
    "configuration": Parser("config.json", read_configuration, configurations, of_trees),
    "results": Parser("results.json", read_results, results, of_trees),
    "record": Parser("cpu.json", read_record, records, of_digested),
    "stamp": Parser("mlx_audit.json", read_stamp, stamps, of_digested),
    "card": Parser("README.md", read_card, cards, of_bytes),
    "weights": Parser("w.safetensors", read_weights, weights, weight_inputs),
    "gguf": Parser("model.gguf", read_gguf_header, ggufs, of_bytes),
    "known_failures": Parser("known_failures.txt", read_known, known, of_bytes),
    "source": Parser("model.py", read_python, models, of_bytes),
}
