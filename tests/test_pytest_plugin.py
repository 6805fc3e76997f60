"""The pytest plugin, as adopters run it: `pytest FOLDER` in a process of its own, on a folder of small manifests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from command import environment, mlx_audit
from mlx_audit import resources
from mlx_audit.audit import runner
from mlx_audit.evidence.codes import needed_codes

assert (
    runner
)  # imported for pytest runs inside this process, which forget what they import; numpy bears it only once
pytest_plugins = "pytester"
pytestmark = pytest.mark.xdist_group("pytest_plugin")

STRICT = ("-p", "no:cacheprovider", "--strict-markers", "-W", "error")

ITEMS = sorted([*needed_codes(), "verdict"])
OUTCOME = re.compile(r"^(PASSED|FAILED|XFAIL|ERROR) (?:\S+/)?(\S+?)(?: - (.*))?$", re.MULTILINE)
DYNAMIC = "      rope_scaling: {rope_type: dynamic, factor: 4.0}\n"


def small(claim: str = "capable", *, family: str = "qwen2", dynamic: bool = False) -> str:
    """Return the text of qwen2's manifest for two layers, without published configurations.

    With `dynamic`, the RoPE kind makes TRC001 fail, and nothing else is run; otherwise that kind is claimed undecided.
    """
    text = (resources.model_audits() / "qwen2.yaml").read_text(encoding="utf-8")
    kinds = "[dynamic]" if dynamic else "[default, {dynamic: undecided}]"
    for pattern, new in (
        (r"configurations:\n(?:  - .*\n)+", ""),
        (r"rope: .*", f"rope: {kinds}"),
        (r"family: qwen2", f"family: {family}"),
        (r"num_hidden_layers: 4", "num_hidden_layers: 2"),
        (r"compiled_decode: capable, prefix_restore: capable", f"compiled_decode: {claim}"),
        (r"(?=    claims:)", DYNAMIC if dynamic else ""),
    ):
        text, count = re.subn(pattern, new, text)
        assert count == 1, pattern
    return text


def folder_of(parent: Path, **files: str) -> Path:
    """Make a folder `audits` of manifests, and of a file `known_failures.txt`."""
    audits = parent / "audits"
    audits.mkdir()
    for name, text in files.items():
        suffix = "txt" if name == "known_failures" else "yaml"
        (audits / f"{name}.{suffix}").write_text(text, encoding="utf-8")
    return audits


def run(cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest to its end, with markers checked and warnings made errors, as careful adopters do."""
    changes: dict[str, str | None] = dict.fromkeys(
        ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER_COUNT")
    )
    changes["COLUMNS"] = "1000"  # messages are cut to fit
    return subprocess.run(
        [sys.executable, "-m", "pytest", *STRICT, *arguments],
        cwd=cwd,
        env=environment({**changes, **env}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Return outcome and message of each item of a run with `-rA`, by its name after the folder."""
    return {item: (outcome, message or "") for outcome, item, message in OUTCOME.findall(done.stdout)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Two families, one claimed not-capable, on two workers."""
    folder = tmp_path_factory.mktemp("healthy")
    folder_of(folder, qwen2=small(), stretched=small("not-capable", family="stretched", dynamic=True))
    return run(folder, "audits", "-n", "2", "-v", "-rA")


def test_claims_that_hold_pass(healthy: subprocess.CompletedProcess[str]) -> None:
    """Not red are the RoPE kind claimed undecided, nor the failures that confirm a claim not-capable."""
    assert healthy.returncode == 0, healthy.stdout
    wanted = {
        f"{f}.yaml::{f}::full::{item}": ("PASSED", "") for f in ("qwen2", "stretched") for item in ITEMS
    }
    assert outcomes(healthy) == wanted


def test_failures_that_move_nothing_are_shown(healthy: subprocess.CompletedProcess[str]) -> None:
    """In a section of its own: what confirms the claim not-capable, and what does not apply."""
    text = healthy.stdout.partition("_ stretched::full::TRC001 _")[2].partition("\n____")[0]
    assert re.search(
        r"^-+ Captured mlx-audit call -+\ntiny\S*: failed, where the claim is not-capable: ", text, re.M
    )
    text = healthy.stdout.partition("_ qwen2::full::TOP004 _")[2].partition("\n____")[0]
    assert re.search(r"^tiny: not applicable: \S", text, re.MULTILINE)


def test_each_family_is_audited_on_one_worker(healthy: subprocess.CompletedProcess[str]) -> None:
    ran = re.findall(r"^\[(gw\d)\] \[ *\d+%\] PASSED audits/(\w+)", healthy.stdout, re.MULTILINE)
    assert len(ran) == 2 * len(ITEMS)
    assert len(set(ran)) == 2


@pytest.mark.parametrize(("claim", "code"), [("undecided", 0), ("capable", 1)])
def test_items_agree_with_the_exit_code(tmp_path: Path, claim: str, code: int) -> None:
    folder_of(tmp_path, stretched=small(claim, family="stretched", dynamic=True))
    assert mlx_audit("run", "audits/stretched.yaml", cwd=tmp_path).returncode == code
    assert run(tmp_path, "audits", "-q").returncode == code


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("planted")
    folder_of(folder, qwen2=small())
    return run(folder, "audits", "-n", "2", "-rA", MLX_AUDIT_PLANT="mask_forgets_the_first_token")


def test_a_planted_fault_fails_in_the_right_place(planted: subprocess.CompletedProcess[str]) -> None:
    assert planted.returncode == 1
    found = {name.rpartition("::")[2]: outcome for name, outcome in outcomes(planted).items()}
    assert sorted(found) == ITEMS
    failed = {code for code, (outcome, _) in found.items() if outcome == "FAILED"}
    resting = {
        code for code in failed if found[code][1].endswith("not run: it rests on PAR001, which failed")
    }
    assert failed - resting == {"PAR001", "verdict"}
    assert found["TRC001"] == ("PASSED", "")


def test_a_failure_says_what_where_and_how_to_see_it_again(planted: subprocess.CompletedProcess[str]) -> None:
    text = planted.stdout.partition("_ qwen2::full::PAR001 _")[2].partition("\n____")[0]
    assert re.search(r"^tiny: logits differ at step 1 .+ is -?[\d.]+, wanted -?[\d.]+,", text, re.MULTILINE)
    assert re.search(r"^  PAR001: \S", text, re.MULTILINE)
    assert re.search(r"^  at step 1", text, re.MULTILINE)
    assert (
        "\n  reproduce: mlx-audit run audits/qwen2.yaml --only PAR001 --seed 0 --profile quick\n"
        in text + "\n"
    )
    assert "Traceback" not in planted.stdout
    assert ".py:" not in text


def test_the_verdict_names_the_claim(planted: subprocess.CompletedProcess[str]) -> None:
    assert "\ntiny: claimed capable, found not-capable: PAR001 " in planted.stdout


def test_a_planted_fault_is_announced(planted: subprocess.CompletedProcess[str]) -> None:
    assert "A FAULT IS PLANTED: MLX_AUDIT_PLANT=mask_forgets_the_first_token" in planted.stdout


KNOWN = """\
# What fails here, and why.
stretched::full::SRC001  # mlx-lm branches on the position
stretched::full::TRC001  # mlx-lm branches on the position
stretched::full::TOP001  # mended long ago
stretched::full::TRC01   # a slip
elsewhere::full::TRC001  # another family, not collected
"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """A family whose claim does not hold, with a list of known failures."""
    folder = tmp_path_factory.mktemp("known")
    folder_of(folder, stretched=small(family="stretched", dynamic=True), known_failures=KNOWN)
    done = run(folder, "audits", "-rA")
    assert done.returncode == 1
    return {name.partition("stretched::")[2]: outcome for name, outcome in outcomes(done).items()}


def test_known_failures_are_expected_with_their_reason(known: dict[str, tuple[str, str]]) -> None:
    for code in ("SRC001", "TRC001"):
        assert known[f"full::{code}"] == ("XFAIL", "mlx-lm branches on the position")


def test_what_rests_on_a_known_failure_is_expected_too(known: dict[str, tuple[str, str]]) -> None:
    why = "mlx-lm branches on the position"
    for item in ("PAR001", "MSK005"):
        assert known[f"full::{item}"] == ("XFAIL", f"rests on TRC001: {why}")
    assert known["full::verdict"] == ("XFAIL", f"rests on SRC001: {why}; rests on TRC001: {why}")


def test_a_line_whose_item_passes_fails(known: dict[str, tuple[str, str]]) -> None:
    outcome, message = known["full::TOP001"]
    assert outcome == "FAILED"
    assert message.startswith("Failed: audits/known_failures.txt:4: it passes")


def test_a_line_that_names_no_item_fails_and_no_other(known: dict[str, tuple[str, str]]) -> None:
    outcome, message = known["known_failures.txt:5"]
    assert outcome == "FAILED"
    assert message.startswith(
        "Failed: audits/known_failures.txt:5: there is no item stretched::full::TRC01; fix: did"
    )
    failed = {name for name, (outcome, _) in known.items() if outcome == "FAILED"}
    assert failed == {"full::TOP001", "known_failures.txt:5"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("qwen2::full::TRC001", "known_failures.txt:1: the line names no known failure with its reason"),
        ("qwen2::full::TRC001  #", "known_failures.txt:1: the line names no known failure with its reason"),
        ("qwen2::TRC001  # why", "allowed: family::variant::check  # reason"),
        ("a::b::c # why\na::b::c # why", "known_failures.txt:2: the item is listed twice"),
    ],
)
def test_a_list_that_cannot_be_read_ends_the_run(pytester: pytest.Pytester, line: str, message: str) -> None:
    folder_of(pytester.path, qwen2=small(), known_failures=line)
    done = pytester.runpytest_inprocess("audits", *STRICT, "--collect-only")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr.str()
    assert "Traceback" not in done.stderr.str()


def test_the_list_can_be_named(pytester: pytest.Pytester) -> None:
    folder_of(pytester.path, qwen2=small(), known_failures="nonsense")
    mine = pytester.path / "mine.txt"
    mine.write_text("qwen2::full::TRC999  # no such check\n", encoding="utf-8")
    done = pytester.runpytest_inprocess("audits", *STRICT, "--mlx-audit-known", "mine.txt", "-k", "mine")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    assert "mine.txt:1: there is no item qwen2::full::TRC999" in done.stdout.str()
    done = pytester.runpytest_inprocess("audits", *STRICT, "--mlx-audit-known", "nowhere.txt")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "nowhere.txt: the known failures cannot be read" in done.stderr.str()


def test_a_broken_manifest_is_an_error_with_its_place(pytester: pytest.Pytester) -> None:
    folder_of(pytester.path, qwen2=small().replace("cache: linear", "cache: linaer"))
    done = pytester.runpytest_inprocess("audits", *STRICT, "--collect-only")
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.re_match_lines([r"audits/qwen2\.yaml:13:15: .+ did you mean 'linear'\?$"])
    assert "Traceback" not in done.stdout.str()


LOOK = """
import sys, pytest
code = pytest.main(sys.argv[1:])
print("imported:", sorted({"mlx.core", "pydantic", "yaml", "mlx_audit.audit.runner", "mlx_lm"} & set(sys.modules)))
sys.exit(code)
"""


def look(cwd: Path, *arguments: str) -> str:
    """Run pytest in a fresh process and return what it prints, last of all which heavy modules it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, "-p", "no:cacheprovider", "-q", *arguments],
        cwd=cwd,
        env=environment({"PYTEST_ADDOPTS": None}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def test_what_was_not_asked_for_is_left_alone(tmp_path: Path) -> None:
    """Neither foreign YAML, nor manifests of a folder that is not named itself, nor records."""
    audits = folder_of(tmp_path, foreign="family: Roboto\nweight: 400\n", qwen2=small())
    (audits / "records").mkdir()
    (audits / "records" / "qwen2.yaml").write_text(small(), encoding="utf-8")
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n", encoding="utf-8")
    for arguments in ((".",), ("audits/records", "audits/foreign.yaml", "test_own.py")):
        text = look(tmp_path, *arguments)
        assert "qwen2" not in text
        assert "imported: []" in text
    text = look(tmp_path, ".")
    assert "1 passed" in text


def test_collecting_audits_nothing(tmp_path: Path) -> None:
    folder_of(tmp_path, foreign="family: Roboto\nweight: 400\n", qwen2=small())
    text = look(tmp_path, "audits", "--collect-only")
    assert "audits/qwen2.yaml::qwen2::full::verdict\n" in text
    assert f"{len(ITEMS)} tests collected" in text
    assert "imported: ['pydantic', 'yaml']" in text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("-m", "trace"), {code for code in ITEMS if code.startswith("TRC")}),
        (("-m", "mlx_audit and not static and not trace and not numeric"), {"verdict"}),
        (("-k", "qwen2 and PAR001"), {"PAR001"}),
        (("-m", "static", "-k", "not TOP001 and not SRC"), {"TOP002", "TOP003", "TOP004"}),
    ],
)
def test_items_are_selected(pytester: pytest.Pytester, arguments: tuple[str, ...], wanted: set[str]) -> None:
    folder_of(pytester.path, qwen2=small())
    done = pytester.runpytest_inprocess("audits", *STRICT, "--collect-only", "-q", *arguments)
    assert {line.rpartition("::")[2] for line in done.outlines if "::full::" in line} == wanted


def test_checks_of_a_further_claim_are_items_where_it_is_made(pytester: pytest.Pytester) -> None:
    def claiming(text: str, claim: str) -> str:
        return text.replace(
            "{compiled_decode: capable}", f"{{compiled_decode: capable, prefix_restore: {claim}}}"
        )

    claimed, undecided = claiming(small(), "capable"), claiming(small(family="llama"), "undecided")
    folder_of(pytester.path, qwen2=claimed, llama=undecided, mine=small(family="mine"))
    done = pytester.runpytest_inprocess("audits", *STRICT, "--collect-only", "-q")
    found = [line.split("::")[1:] for line in done.outlines if "::RST" in line]
    assert found == [
        ["qwen2", "full", code] for code in sorted(needed_codes("prefix_restore")) if code[:3] == "RST"
    ]


def test_an_item_is_named_by_its_id(pytester: pytest.Pytester) -> None:
    folder_of(pytester.path, qwen2=small())
    item = "audits/qwen2.yaml::qwen2::full::PAR001"
    done = pytester.runpytest_inprocess(item, *STRICT, "--collect-only", "-q")
    assert [line for line in done.outlines if "::" in line] == [item]


def test_a_linked_manifest_is_a_file_where_the_link_lies(tmp_path: Path) -> None:
    audits = folder_of(tmp_path, qwen2=small(), known_failures="nonsense")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "linked.yaml").symlink_to(audits / "qwen2.yaml")
    done = run(tmp_path, "links", "--collect-only", "-q")
    assert done.returncode == 0
    assert "links/linked.yaml::qwen2::full::PAR001\n" in done.stdout


def test_a_target_that_cannot_be_audited_fails_everywhere(pytester: pytest.Pytester) -> None:
    folder_of(pytester.path, qwen2=re.sub(r"      vocab_size: 64\n", "", small()))
    done = pytester.runpytest_inprocess("audits", *STRICT, "-k", "PAR001 or verdict")
    done.assert_outcomes(failed=2, deselected=len(ITEMS) - 2)
    assert done.stdout.str().count("\nthe audit could not be made: ") == 2
