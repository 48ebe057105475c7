"""The page of ``cvt bench --report``: its summary, tables, plots and the machine, as one HTML file."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from cvt.files import filling

from . import summary
from .plots import draw, png
from .results import (
    MEMORY,
    Range,
    Results,
    advice,
    first_rows,
    heading,
    meaning,
    parity_rows,
    products,
    speed_rows,
)


def write_report(results: Results, directory: str | os.PathLike[str]) -> list[Path]:
    """Writes ``index.html``, which needs no other file and no network, and its plots; returns the files."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    figures, names = [], ["index.html"]
    with filling(directory) as scratch:
        for plot in draw(results):
            image = png(plot.figure)
            names.append(f"{plot.name}.png")
            (scratch / names[-1]).write_bytes(image)
            data = base64.b64encode(image).decode("ascii")
            figures.append({"title": plot.title, "caption": plot.caption, "data": data})
        (scratch / "index.html").write_text(_page(results, figures), encoding="utf-8")
    return [directory / name for name in names]


def _page(results: Results, figures: list[dict[str, str]]) -> str:
    import jinja2  # what imports this need not wait for it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    facts = {"date": results["date"], **results["machine"], **results["versions"]}
    facts |= {"photographs": results["config"]["photos"], "backends": results["config"]["backends"]}
    batches = results["batches"]
    return environment.get_template("report.html").render(
        summary=summary.sentence(results),
        heading=heading(results),
        contenders=[["contender", ""], *([k, meaning(about)] for k, about in results["contenders"].items())],
        explained=" ".join([*products(results), MEMORY, *advice(results)]),
        numbers=[
            *(speed_rows(results, batch, _marked) for batch in batches),
            *filter(None, [first_rows(results)]),
            *(parity_rows(results, batch) for batch in batches),
        ],
        figures=figures,
        doubts_explained=summary.DOUBTS,
        machine=[["", ""], *([name, _plain(value)] for name, value in facts.items())],
    )


def _marked(factor: Range) -> str | tuple[str, str]:
    """Returns a ratio, with the word for what is doubtful about it."""
    word = summary.doubt(factor)
    return (str(factor), word) if word else str(factor)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {item}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
