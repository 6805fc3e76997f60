"""`python -m mlx_audit` is the command `mlx-audit`."""

from __future__ import annotations

from mlx_audit.cli import main

if __name__ == "__main__":
    main()
