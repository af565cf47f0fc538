"""The command ``moecache``: replay routing traces, look at them, convert and merge them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; what the library says about bad input goes to stderr, with exit code 2.

    Other exit codes: 130 interrupted, 1 when whoever reads the output has gone.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the command moecache needs {' and '.join(missing)}: pip install 'moecache[cli]'")
    from .errors import MoeCacheError
    from .lab.command import application

    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no sign for a name or a line of a table shows its number, and nothing is lost.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        try:
            application(args=arguments, obj=arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MoeCacheError, OSError) as error:
        _fail(str(error))
    except MemoryError:
        _fail("not enough memory")


def _fail(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    _drop_output()
    sys.exit(2)


def _drop_output() -> None:
    # What is still buffered cannot be written, and the interpreter would try again when it ends.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
