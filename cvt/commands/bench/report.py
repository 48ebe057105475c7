"""The page of ``cvt bench --report``: its tables, its plots and the machine, as one HTML file."""

from __future__ import annotations

import base64
import html
import os
from pathlib import Path
from typing import Any

from ...files import filling
from .plots import draw, png
from .results import MEMORY, Results, heading, meaning, parity_rows, products, speed_rows

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ccc; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; white-space: normal; }
img { max-width: 100%; }
"""


def write_report(results: Results, directory: str | os.PathLike[str]) -> list[Path]:
    """Writes ``index.html``, which needs no other file and no network, and its plots as PNG files.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    sections, names = [], ["index.html"]
    with filling(directory) as scratch:
        for plot in draw(results):
            image = png(plot.figure)
            names.append(f"{plot.name}.png")
            (scratch / names[-1]).write_bytes(image)
            source = "data:image/png;base64," + base64.b64encode(image).decode("ascii")
            words = html.escape(plot.title)
            sections.append(
                f'<h2>{words}</h2>\n<img alt="{words}" src="{source}">\n<p>{html.escape(plot.caption)}</p>'
            )
        (scratch / "index.html").write_text(_page(results, sections), encoding="utf-8")
    return [directory / name for name in names]


def _page(results: Results, sections: list[str]) -> str:
    legend = [[key, meaning(about)] for key, about in results["contenders"].items()]
    facts = {"date": results["date"], **results["machine"], **results["versions"]}
    facts |= {"photographs": results["config"]["photos"], "backends": results["config"]["backends"]}
    tables = [_html_table(speed_rows(results, batch)) for batch in results["batches"]]
    tables += [_html_table(parity_rows(batch)) for batch in results["batches"]]
    explained = " ".join([*products(results), MEMORY])
    body = [
        "<h1>cvt bench</h1>",
        f"<p>{html.escape(heading(results))}</p>",
        _html_table([["contender", ""], *legend], "facts"),
        "<h2>Speed, memory, parity</h2>",
        f"<p>× peer: times as fast as that peer, median (quartiles). {html.escape(explained)}</p>",
        *tables,
        *sections,
        "<h2>Machine</h2>",
        _html_table([["", ""], *([name, _plain(value)] for name, value in facts.items())], "facts"),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>cvt bench</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _html_table(rows: list[list[str]], css_class: str = "numbers") -> str:
    lines = []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f'<table class="{css_class}">\n' + "\n".join(lines) + "\n</table>"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {item}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
