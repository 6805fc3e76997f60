"""Runs command lines one after the other in this process: a JSON list of them in, their outcomes as JSON out."""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback

from typer.testing import CliRunner

from mlx_audit.cli import application


def main() -> None:
    runner, app = CliRunner(), application()
    outcomes = []
    for arguments in json.load(sys.stdin):
        start = time.perf_counter()
        done = runner.invoke(app, arguments, prog_name="mlx-audit")
        strange = done.exception if not isinstance(done.exception, SystemExit) else None
        outcomes.append(
            {
                "code": done.exit_code,
                "text": done.output[-4000:],
                "strange": "".join(traceback.format_exception(strange)) if strange is not None else "",
                "seconds": time.perf_counter() - start,
            }
        )
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = [
        resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    json.dump({"outcomes": outcomes, "peak": max(peaks)}, sys.stdout)


if __name__ == "__main__":
    main()
