"""Pages: the frame of one, tables, and how it was made."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["document", "table"]

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2126; background: #fff; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { margin-top: 3rem; border-bottom: 2px solid #dde3e8; padding-bottom: .2rem; }
h3 { margin: 2rem 0 .4rem; } p { max-width: 46rem; } img { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #e4e9ed; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #9aa5ae; } .wide { overflow-x: auto; }
.note { color: #55606a; font-size: .92rem; } nav a { margin-right: 1rem; } summary { cursor: pointer; }
"""


def document(title: str, body: str, made: Mapping[str, Any]) -> str:
    """A whole page.

    Parameters
    ----------
    title : str
    body : str
        HTML.
    made : mapping
        How, as :func:`moecache.lab.provenance.provenance` gives it.
    """
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>{body}{_made(made)}</html>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a line feed in a heading breaks it."""
    cells = "".join(f"<th>{html.escape(name).replace(chr(10), '<br>')}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _made(made: Mapping[str, Any]) -> str:
    command = html.escape(shlex.join(made["command"]))
    rows = [
        [name, str(value)]
        for name, value in {**made["versions"], **made}.items()
        if name not in ("command", "versions", "files")
    ]
    files = [[str(file["path"]), file["sha256"], f"{file['bytes']:,}"] for file in made["files"]]
    return (
        f"<h2>How this was made</h2><p><code>{command}</code></p>{table(['file', 'SHA-256', 'bytes'], files)}"
        f"{table(['', ''], rows)}"
    )
