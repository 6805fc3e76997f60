"""Reports: one module a format, each with `render(documents) -> str`, made from results alone.

Nothing is imported here: a format is found by its name, `mlx_audit.reports.<format>`.
"""
