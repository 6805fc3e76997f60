"""Reading a model's source, without importing or running it: who consumes the position, and how."""

from mlx_audit.source.reading import read_source
from mlx_audit.source.report import Consumer, SourceReport

__all__ = ["Consumer", "SourceReport", "read_source"]
