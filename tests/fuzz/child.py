"""Feeds parsers, in a process of their own: `python child.py '{PARSER: COUNT, …}' SEED`; first the corpus/.

Prints one JSON object: by parser, how often each outcome came and the slowest input in seconds, and the largest memory
in bytes. What is neither a value nor a typed error ends the process with its traceback, after Hypothesis has made the
input small.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.parsers import AUDITS, PARSERS, Parser
from mlx_audit.errors import MlxAuditError
from mlx_audit.manifests import ManifestError

CORPUS = Path(__file__).parent / "corpus"

LIMIT = 2.0
"""Seconds of processor time that one input may take."""


class TooSlow(BaseException):
    """An input took more than the limit."""


def stop(*_: object) -> None:
    raise TooSlow(f"more than {LIMIT} s")


class Feeder:
    """Gives inputs to a parser, and counts what comes of them."""

    def __init__(self, parser: Parser, folder: Path) -> None:
        self.parser, self.file = parser, folder / parser.file
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0

    def feed(self, data: bytes) -> str:
        """Return the name of the outcome.

        Raises:
            Exception: whatever is no value and no typed error.
        """
        self.file.write_bytes(data)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        try:
            self.parser.read(self.file)
            outcome = "value"
        except MlxAuditError as error:
            outcome = type(error).__name__
            check(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.slowest = max(self.slowest, time.process_time() - start)
        self.outcomes[outcome] += 1
        return outcome


def check(error: MlxAuditError) -> None:
    """A typed error says where, ends with 2, and is text that a terminal may show."""
    assert error.exit_code == 2, (type(error), error.exit_code)
    assert error.where or (isinstance(error, ManifestError) and error.problems), f"nowhere: {error}"
    text = str(error)
    text.encode()
    assert text.replace("\n", "").isprintable() or "\u00ad" in text or " " in text
    assert "\x1b" not in text
    assert len(text) < 1_000_000


def fuzz(name: str, count: int, start: int, folder: Path) -> Feeder:
    """Feed one parser its real inputs, its corpus, and `count` inputs grown from them."""
    parser = PARSERS[name]
    feeder = Feeder(parser, folder)
    seeds = list(parser.seeds())
    for data in seeds:
        assert feeder.feed(data) == "value", f"{name}: a real input is refused"
    for file in sorted((CORPUS / name).iterdir()):
        try:
            outcome = feeder.feed(contents(file))
            # Its name says what must come of it.
            assert (outcome == "value") == file.name.startswith("value"), outcome
        except BaseException as error:
            error.add_note(f"on {file}")
            raise

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(parser.inputs(seeds))
    def grow(data: bytes) -> None:
        feeder.feed(data)

    if count:
        grow()
    return feeder


def contents(file: Path) -> bytes:
    """Return what a file of the corpus says; one in `.bomb` computes it, as `data`, so that bombs stay small here."""
    if file.suffix != ".bomb":
        return file.read_bytes()
    names: dict[str, bytes] = {}
    exec(compile(file.read_bytes(), str(file), "exec"), names)  # our own file
    return names["data"]


def main(counts: dict[str, int], start: int) -> None:
    signal.signal(signal.SIGPROF, stop)
    told = {}
    for name, count in counts.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "here"
            folder.mkdir()
            (folder / "configurations").symlink_to(AUDITS / "configurations")
            feeder = fuzz(name, count, start, folder)
        told[name] = {"outcomes": feeder.outcomes, "slowest": feeder.slowest}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sys.stdout.write(json.dumps({"parsers": told, "peak": peak}) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
