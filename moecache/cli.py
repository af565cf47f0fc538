"""The command ``moecache``: replay routing traces, look at them, convert and merge them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; what the library says about bad input goes to stderr, with exit code 2."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the command moecache needs {' and '.join(missing)}: pip install 'moecache[cli]'")
    from .errors import MoeCacheError
    from .lab.command import application

    try:
        application(args=arguments)
    except (MoeCacheError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
