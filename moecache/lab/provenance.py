"""How a result was made: what anyone needs to make it again, kept with the rows and on the page."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["package_version", "provenance"]


def provenance(arguments: Sequence[str], files: Sequence[Path], **options: Any) -> dict[str, Any]:
    """The command, the versions that ran it, and digests of the files it read.

    Parameters
    ----------
    arguments : sequence of str
        Of the command line, after ``moecache``.
    files : sequence of path
        Traces and histories.
    **options
        What was in force, defaults included; plain values.

    Raises
    ------
    FileNotFoundError
    """
    return {
        "command": ["moecache", *arguments],
        "versions": {
            "moecache": package_version(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": f"{platform.system()} {platform.machine()}",
        },
        "files": [{"path": str(path), "sha256": _digest(path), "bytes": path.stat().st_size} for path in files],
        **options,
    }


def package_version() -> str:
    """Of the installed package; "unknown" where it is run from its sources."""
    try:
        return version("moecache")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def _digest(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"no routing trace or history at {path}")
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()
