"""Tables and a picture of what the suites measured: at the end of a run, and as pages of docs/.

``python -m benchmarks.report FILE...`` prints the tables of pytest-benchmark's JSON files, and ``--plot``
draws the operators. ``--pages`` makes docs/results.md, docs/measurements.md and the tables of README.md from
benchmarks/results/, of which the newest figure of each row counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cvt.extras import require
from cvt.files import replacing
from cvt_kernels.messages import aligned, markdown
from cvt_kernels.tuning.clock import DISTURBED

ROOT = Path(__file__).resolve().parent.parent
RESULTS, README = ROOT / "benchmarks/results", ROOT / "README.md"
#: What users read, and every figure.
PAGE, EVERYTHING = ROOT / "docs/results.md", ROOT / "docs/measurements.md"
#: The lines between which a table of README stands.
END = "<!-- end -->\n"
BEGIN = {
    kind: f"<!-- measured{words}: written by make results -->\n"
    for kind, words in (("cuda", " on a GPU"), ("cpu", ""))
}
NAMES = {
    "cvt_13": "CvT-13",
    "cvt_w24": "CvT-W24 384²",
    "segformer_b0": "SegFormer-B0 512²",
    "pvt_v2_b2": "PVT v2-B2",
    "vit_s16": "ViT-S/16",
    "vit_b16": "ViT-B/16",
    "dinov2_s14": "DINOv2-S/14",
    "dinov2_s14_518": "DINOv2-S/14 518²",
    "clip_b32": "CLIP ViT-B/32",
    "tf32": "float32 with TF32",
}
#: What ``kernels.py`` writes.
KERNELS = "benchmarks kernels"
SHORT = """\
# Results

**All weights are random.** With yours:

    cvt bench --checkpoint microsoft/cvt-13 --batch-size 1 8 --peers openvino,openvino-int8,accelerate-int8

[Every figure](measurements.md), `torch.compile` and errors too; [how](report.md); [beside other
programs](accelerated.md#threads-of-a-cpu). "Accelerated" is what `accelerate(model)` serves on a CPU,
`freeze=True` and `graphed` on a GPU. × is how many times as fast as Hugging Face's model, the median of
rounds. Process memory is what a process takes to serve, packed weights included; 1 is Hugging Face's.
int8: 8-bit weights and inputs of layers, the row's dtype between them; OpenVINO's are made by
NNCF by default. Where no batch is given, two figures in a cell are of batches of 1 and 8."""
INTRODUCTION = """\
# Every figure

`make results` makes this page from `benchmarks/results/`, never by hand. `make gpu` measures on an NVIDIA
GPU and `make bench` on a CPU; [how to read and compare](report.md). All weights are random. What waits for a
GPU is in `benchmarks/gpu_queue.md`.

On a GPU, milliseconds of models are by events around calls that follow one another and, in parentheses, by
the clock, with a synchronization before and after each call. `torch.compile` has its best mode for the size.
On a CPU all contenders take turns, each in a process of its own, with the same weights. `accelerate-frozen`
is what `accelerate(model)` serves in evaluation; `accelerate` and "live" are after
`accelerate(model, freeze=False)`."""

Row = dict[str, Any]
#: What tells steps whose kernels were listed, and rows of models, apart.
_STEP = ("model", "train", "contender", "batch_size")
_MODEL = ("suite", "model", "dtype", "batch", "contender")


# Reading --------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """Reads the rows of a JSON file of pytest-benchmark: each one's ``extra_info``, its times and machine.

    Raises:
        ValueError: The file holds something else, or a smoke test.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        machine = content["machine_info"]
        if machine.get("tiny"):
            raise ValueError(f"{path}: holds a smoke test, which is no result")
        facts = {
            "run": content["datetime"][:10],
            "when": content["datetime"],
            "commit": (content.get("commit_info") or {}).get("id") or "?",
            "machine": machine,
            "kind": machine["device_type"],
            "device": machine["device"],
        }
        return [
            {**facts, **row["extra_info"], "seconds": stats["median"], "rounds": stats.get("data")}
            for row in content["benchmarks"]
            for stats in [row["stats"]]
            if "suite" in row["extra_info"]
        ]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is no JSON of the suites: {type(error).__name__} {error}") from error


def newest(rows: Iterable[Row], *fields: str) -> list[Row]:
    """Returns the last measured row of each combination of fields, in the order of models and dtypes."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row["when"]):
        found[tuple(map(row.get, fields))] = row
    known, dtypes = list(NAMES), ["float32", "bfloat16"]

    def place(row: Row) -> tuple[Any, ...]:
        model, dtype = row["model"], row["dtype"]
        return (
            known.index(model) if model in known else len(known),
            bool(row.get("train")),
            dtypes.index(dtype) if dtype in dtypes else len(dtypes),
            row["batch"],
        )

    return sorted(found.values(), key=place)


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Returns the rows by a key, in the order of the first of each."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


# Operators ------------------------------------------------------------------------------------------------


def operator_tables(rows: Sequence[Row], *, brief: bool = False) -> dict[str, list[list[str]]]:
    """Returns a table for each operator, of all contenders, or of the fastest backend alone."""
    tables = {}
    for operator, its in grouped(rows, lambda row: row["operator"]).items():
        head = ["case", "contender", "ms", "× eager", "× compile", "GB/s", "TFLOP/s", "% of ceiling"]
        table = [[*head, "error, of allowed"]]
        for case, contenders in grouped(its, lambda row: row["case"]).items():
            times = {row["contender"]: row["seconds"] for row in contenders}
            ours = [row for row in contenders if row["contender"] not in ("reference", "torch.compile")]
            for row in ours and [min(ours, key=lambda row: row["seconds"])] if brief else contenders:
                rates = [f"{row[name]:.3g}" for name in ("gigabytes_per_second", "teraflop_per_second")]
                beside = [ratio(times.get(name), row["seconds"]) for name in ("reference", "torch.compile")]
                share = f"{row['error'] / row['error_allowed']:.0%}" if row["error_allowed"] else "–"
                doubt = " ?" if row["is_disturbed"] else ""
                place = case.removeprefix(f"{operator}-").replace("-", " ")
                time = number(1e3 * row["seconds"]) + doubt
                percent = f"{row['percent_of_ceiling']:.0f}"
                table.append([place, row["contender"], time, *beside, *rates, percent, share])
        if len(table) > 1:
            tables[operator] = table
    return tables


def ratio(theirs: float | None, ours: float) -> str:
    """Returns how many times as fast ours is, or a dash."""
    return "–" if theirs is None else f"{theirs / ours:.2f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws how many times as fast as eager torch.compile and the fastest backend are, by operator.

    A bar is the geometric mean over an operator's cases; a whisker reaches from the least to the most.
    """
    pyplot = require("matplotlib.pyplot", "bench")
    bars: dict[str, dict[str, list[float]]] = {}
    for (operator, _), its in grouped(rows, lambda row: (row["operator"], row["case"])).items():
        times = {row["contender"]: row["seconds"] for row in its}
        eager, compiled = times.pop("reference", None), times.pop("torch.compile", None)
        best = min(times.values(), default=None)
        for name, seconds in (("torch.compile", compiled), ("the fastest backend", best)):
            if eager is not None and seconds is not None:
                bars.setdefault(name, {}).setdefault(operator, []).append(eager / seconds)
    names = list(dict.fromkeys(operator for each in bars.values() for operator in each))
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.4 * len(names)), layout="constrained")
    for i, (name, ratios) in enumerate(bars.items()):
        means = {operator: statistics.geometric_mean(each) for operator, each in ratios.items()}
        reach = [[means[o] - min(ratios[o]) for o in means], [max(ratios[o]) - means[o] for o in means]]
        places = [names.index(operator) + 0.4 * i - 0.2 for operator in means]
        axes.barh(places, list(means.values()), 0.4, xerr=reach, label=name, error_kw={"lw": 0.8})
    axes.axvline(1, color="black", lw=0.8)
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="× PyTorch eager", title=rows[0]["device"])
    axes.invert_yaxis()
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# Models ---------------------------------------------------------------------------------------------------

#: The contenders of a GPU's table that stand for this project, the first that was measured, and others.
OURS = ("accelerate-graphed", "accelerate-live-graphed", "accelerate")
OTHERS = {
    "accelerate": "live",
    "accelerate-live-graphed": "as CUDA graphs",
    "accelerate-compile": "under `torch.compile`",
    "accelerate-int8-graphed": "int8",
    "accelerate-float8-graphed": "float8",
}


def kind_of(row: Row) -> str:
    """Returns what a row is of, in words."""
    name = NAMES.get(row["model"], row["model"])
    kind = f"{name}, {NAMES.get(row['dtype'], row['dtype'])}"
    return f"{kind}, training step" if row["train"] else kind


def gpu_table(rows: Sequence[Row], *, brief: bool = False) -> list[list[str]]:
    """Returns the table of models on a GPU, with a row for each, its dtype and its batch size.

    A ``brief`` one has what stands for this project alone, where torch.compile was measured too. A figure of
    an earlier run than ours has a mark.
    """
    table = [["", "batch", "eager", "`torch.compile`", "ours", "× eager", "× `torch.compile`"]]
    for (kind, batch), its in sorted(grouped(rows, lambda row: (kind_of(row), row["batch"])).items()):
        last = {row["contender"]: row for row in sorted(its, key=lambda row: row["when"])}
        run = max((row["run"] for row in its if row["contender"] in OURS), default=None)
        first = next((key for key in OURS if key in last and last[key]["run"] == run), None)
        for key in [*([first] if first else []), *(key for key in OTHERS if key != first)]:
            if key not in last or (brief and (key != first or "compile" not in last)):
                continue
            ours, cells, ratios = last[key], [], []
            for peer in map(last.get, ("hf", "compile")):
                mark = "†" if peer and peer["run"] != ours["run"] else ""
                cells.append(milliseconds(peer) + mark if peer else "–")
                ratios.append(ratio(peer["seconds"], ours["seconds"]) + mark if peer else "–")
            told = kind if key == first else f"{kind}, {OTHERS[key]}"
            table.append([told, str(batch), *cells, milliseconds(ours), *ratios])
    return table


def earlier(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the line that explains the marks of a table, if it has any."""
    marked = any("†" in cell for row in table for cell in row)
    return ["† from an earlier run than ours, on another machine of the same kind."] if marked else []


def milliseconds(row: Row) -> str:
    """Returns the time of a row: by events and, if it was measured, by the clock."""
    waits = row.get("waits")
    waited = f" ({number(1e3 * statistics.median(waits))})" if waits else ""
    return number(1e3 * row["seconds"]) + waited


#: The columns of a CPU's table, and those of README.
COLUMNS = {
    "compile": "`torch.compile`",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "accelerate-frozen": "accelerated",
    "openvino-int8": "int8: OpenVINO",
    "accelerate-int8": "int8: accelerated",
}
README_COLUMNS = "compile", "openvino", "accelerate-frozen"
#: What README shows of a CPU, if it was measured: a model's name and its dtype.
README_ROWS = (
    ("cvt_13", "float32"),
    ("cvt_13", "bfloat16"),
    ("segformer_b0", "bfloat16"),
    ("pvt_v2_b2", "bfloat16"),
    ("vit_s16", "float32"),
    ("vit_s16", "bfloat16"),
)


def cpu_table(
    rows: Sequence[Row], batches: Sequence[int] = (8,), shown: Iterable[str] = README_COLUMNS
) -> list[list[str]]:
    """Returns the table of a CPU for users: each model beside Hugging Face's, its batch sizes in one row."""
    measured = {row["contender"] for row in rows}
    columns = {key: COLUMNS[key] for key in shown if key in measured}
    head = ["", "batch", "Hugging Face's, images/s", *columns.values(), "process memory"]
    found: dict[str, list[list[str]]] = {}
    for kind, batch, by_key in served(rows):
        if batch in batches:
            speeds = [beside(by_key, key, "hf") for key in columns]
            rate = number(batch / by_key["hf"]["seconds"])
            memory = share_of_memory(by_key, "accelerate-frozen", "resident_bytes")
            found.setdefault(kind, []).append([str(batch), rate, *speeds, memory])
    return [head, *([kind, *map(", ".join, zip(*its, strict=True))] for kind, its in found.items())]


def served(rows: Iterable[Row]) -> list[tuple[str, int, dict[str, Row]]]:
    """Returns the models of a CPU in evaluation, their batch sizes and rows by contender."""
    found = []
    for (kind, batch), its in grouped(rows, lambda row: (kind_of(row), row["batch"])).items():
        by_key = {row["contender"]: row for row in its}
        if "hf" in by_key and not its[0]["train"]:
            found.append((kind, batch, by_key))
    return found


def error_table(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the largest errors of logits against float64, in batches of 8."""
    columns = {"hf": "Hugging Face's", **COLUMNS}
    columns = {key: head for key, head in columns.items() if key not in ("onnxruntime", "openvino")}
    measured = {row["contender"] for row in rows if row.get("error") is not None}
    columns = {key: head for key, head in columns.items() if key in measured}
    table = [["largest error of a logit", *columns.values()]]
    for kind, batch, by_key in served(rows):
        errors = [by_key.get(key, {}).get("error") for key in columns]
        if batch == 8:
            table.append([kind, *("–" if error is None else f"{error:.1e}" for error in errors)])
    return table


#: Pairs of a contender of ours and its peer, by what a sentence says of them.
PAIRS = {
    "float32": ("float32", "accelerate-frozen", "openvino"),
    "bfloat16": ("bfloat16", "accelerate-frozen", "openvino"),
    "int8": ("float32", "accelerate-int8", "openvino-int8"),
    "int8 with bfloat16": ("bfloat16", "accelerate-int8", "openvino-int8"),
}


def sentence(by_device: dict[str, list[Row]]) -> str:
    """Returns how accelerated models compare with OpenVINO: every CPU, model and batch size, losses too.

    The ratios are those of the tables' columns, as a reader divides them.
    """
    found: dict[str, list[float]] = {}
    for _, _, by_key in (each for rows in by_device.values() for each in served(rows)):
        for name, (dtype, ours, theirs) in PAIRS.items():
            told = [beside(by_key, key, "hf") for key in (ours, theirs)]
            if "–" not in told and by_key["hf"]["dtype"] == dtype:
                one, other = (float(each.split()[0]) for each in told)
                found.setdefault(name, []).append(one / other)
    if not found:
        return ""
    ranges = [f"{name} {min(each):.2f} to {max(each):.2f}" for name, each in found.items()]
    where = f" on {', '.join(sorted(by_device))}" if len(by_device) > 1 else ""
    return f"Times as fast as OpenVINO, over all models and batch sizes{where}: {', '.join(ranges)}."


def contender_table(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the table of one model and dtype on a CPU, with a row for each batch size and contender."""
    measured = {row["contender"] for row in rows}
    peers = [key for key in ("hf", "compile", "onnxruntime", "openvino") if key in measured]
    heads = [*(f"× {peer}" for peer in peers), "memory, of hf's", "first result, s"]
    table = [["batch", "contender", "images/s", *heads]]
    for batch, its in grouped(rows, lambda row: row["batch"]).items():
        by_key = {row["contender"]: row for row in its}
        for key, row in by_key.items():
            cells = [str(batch), f"`{key}`", number(batch / row["seconds"])]
            cells += [beside(by_key, key, peer) for peer in peers]
            first = row.get("first_seconds")
            table.append([*cells, share_of_memory(by_key, key), "–" if first is None else f"{first:.2f}"])
    return table


def beside(rows: dict[str, Row], key: str, peer: str) -> str:
    """Returns a contender's speed as a multiple of a peer's: the median of the rounds' own ratios."""
    if key not in rows or peer not in rows:
        return "–"
    pairs = [rows[name]["rounds"] or [rows[name]["seconds"]] for name in (peer, key)]
    return f"{statistics.median(b / a for b, a in zip(*pairs, strict=False)):.2f} ×"


def share_of_memory(rows: dict[str, Row], key: str, field: str = "peak_bytes") -> str:
    """Returns the memory of a contender as a part of Hugging Face's."""
    ours, theirs = (rows.get(name, {}).get(field) for name in (key, "hf"))
    return "–" if ours is None or not theirs else f"{ours / theirs:.2f}"


# Kernels of a step on a GPU -------------------------------------------------------------------------------


def kernels_of(content: dict[str, Any]) -> list[str]:
    """Returns a heading, a sentence and a table of the kernels of a step, the longest 20 first."""
    step = "a training step" if content["train"] else "a forward"
    ceilings = content["ceilings"]
    told = f"{content['launches']} kernels take {content['us']:,.0f} µs"
    if content["floor_us"]:
        told += (
            f"; memory at {ceilings['copy'] / 1e12:.2f} TB/s and tensor cores at "
            f"{ceilings['product'] / 1e12:.0f} TFLOP/s would take {content['floor_us']:,.0f}"
        )
    sums: dict[str, list[float]] = {}
    for row in content["rows"]:
        name = ", ".join(dict.fromkeys(row.get("operators", map(short, row["kernels"]))))
        for i, value in enumerate((len(row["kernels"]), row["us"], row.get("floor_us", 0))):
            sums.setdefault(name, [0, 0, 0])[i] += value
    table = [["kernel", "launches", "µs", "floor, µs", "share of the floor"]]
    for name, (count, us, floor) in sorted(sums.items(), key=lambda item: -item[1][1])[:20]:
        share = f"{floor / us:.0%}" if floor else "–"
        table.append([f"`{name}`", f"{count:.0f}", number(us), number(floor) if floor else "–", share])
    heading = f"### Kernels of {step}, `{content['contender']}`, batch {content['batch_size']}"
    return [heading, f"{told}.", lines(table)]


def short(kernel: str) -> str:
    """Returns the beginning of a kernel's name."""
    return kernel.removeprefix("void ").split("<")[0][:60]


# The page -------------------------------------------------------------------------------------------------


def short_page(rows: Sequence[Row]) -> str:
    """Returns docs/results.md."""
    models = newest([r for r in rows if r["suite"] != "operators"], "device", *_MODEL)
    by_device = grouped(models, lambda row: row["device"])
    parts = [SHORT]
    for device, its in sorted(by_device.items()):
        parts += [f"## {device}", measured_on(its)]
        if its[0]["kind"] == "cuda":
            table = gpu_table(its, brief=True)
            parts += ["Milliseconds by events; in parentheses what a client waits.", lines(table)]
            parts += earlier(table)
        else:
            shown = [key for key in COLUMNS if key not in ("compile", "onnxruntime")]
            table = cpu_table(its, (1, 8), shown)
            if all(row[1] == "1, 8" for row in table[1:]):  # as the page's beginning says
                table = [[kind, *cells] for kind, _, *cells in table]
            parts += [sentence({device: its}), lines(table).replace(" ×", "×").replace(" | ", "|")]
    return "\n\n".join(filter(None, parts)) + "\n"


def page(rows: Sequence[Row], kernels: dict[str, list[dict[str, Any]]]) -> str:
    """Returns docs/measurements.md; ``kernels`` has the files of ``kernels.py`` by device."""
    parts = [INTRODUCTION]
    by_device = grouped(rows, lambda row: row["device"])
    for kind, command in (("cuda", "make gpu"), ("cpu", "make bench")):
        here = {device: its for device, its in by_device.items() if its[0]["kind"] == kind}
        if not here:
            name = "GPU" if kind == "cuda" else "CPU"
            parts.append(f"**There are no results of a {name} yet.** `{command}` makes them.")
        for device, its in sorted(here.items()):
            parts += section(device, its, kernels.get(device, []))
    return "\n\n".join(parts) + "\n"


def section(device: str, rows: Sequence[Row], kernels: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the section of a device."""
    parts = [f"## {device}"]
    models = newest([r for r in rows if r["suite"] != "operators"], *_MODEL)
    operators = newest([r for r in rows if r["suite"] == "operators"], "case", "contender")
    if models and models[0]["kind"] == "cuda":
        table = gpu_table(models)
        parts += ["### Models", measured_on(models), lines(table), *earlier(table)]
    elif models:
        parts += [lines(error_table(models))]
        for kind, its in grouped(models, kind_of).items():
            parts += [f"### {kind}", measured_on(its), lines(contender_table(its))]
    for operator, table in operator_tables(operators, brief=True).items():
        its = [row for row in operators if row["operator"] == operator]
        parts += [f"### `{operator}`", measured_on(its), lines(table)]
    for content in kernels:
        parts += kernels_of(content)
    return parts


def measured_on(rows: Sequence[Row]) -> str:
    """Returns a sentence that says when and with what rows were measured."""
    runs = sorted({f"{row['run']} at {row['commit'][:9]}" for row in rows})
    machine = rows[-1]["machine"]
    told = [f"torch {machine['torch']}", f"{machine['threads']} threads" if rows[0]["kind"] == "cpu" else ""]
    return f"{', '.join(runs)}; {', '.join(filter(None, told))}."


def fill(text: str, kind: str, table: Sequence[Sequence[str]], told: str) -> str:
    """Puts a table and what is said of it between its marks in README.md.

    Raises:
        ValueError: The marks are not there.
    """
    before, begin, rest = text.partition(BEGIN[kind])
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md: has no {BEGIN[kind].strip()} and {END.strip()}")
    return f"{before}{begin}{lines(table)}\n{told and f'{chr(10)}{told}{chr(10)}'}{end}{after}"


def fill_readme(text: str, rows: Sequence[Row]) -> str:
    """Puts the tables of the GPU and of the CPU with the most figures into README.md."""
    models = newest([r for r in rows if r["suite"] != "operators"], "device", *_MODEL)
    for kind in ("cuda", "cpu"):
        here = [row for row in models if row["kind"] == kind]
        if not here:
            continue
        newest_rows = max(grouped(here, lambda row: row["device"]).values(), key=len)
        if kind == "cpu":
            shown = [row for row in newest_rows if (row["model"], row["dtype"]) in README_ROWS]
            table, told = cpu_table(shown), sentence(grouped(here, lambda row: row["device"]))
        else:
            rest = (row for row in gpu_table(newest_rows, brief=True) if row[1] != "32")
            # Without waits by the clock, and without eager.
            table = [[row[i].split(" (")[0] for i in (0, 1, 3, 4, 6)] for row in rest]
            told = "".join(earlier(table))
        text = fill(text, kind, table, told) if len(table) > 1 else text
    return text


# Words ----------------------------------------------------------------------------------------------------


def lines(table: Sequence[Sequence[str]]) -> str:
    """Returns a table of Markdown."""
    return "\n".join(markdown([list(row) for row in table]))


def number(value: float) -> str:
    """Returns a number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def printed(rows: Sequence[Row]) -> str:
    """Returns the tables of a run as text."""
    blocks: list[str] = []
    for operator, table in operator_tables([r for r in rows if r["suite"] == "operators"]).items():
        blocks.append("\n".join([operator, *aligned(table, right=range(2, len(table[0])))]))
    for kind, its in grouped([r for r in rows if r["suite"] != "operators"], kind_of).items():
        table = contender_table(its)
        blocks.append("\n".join([kind, *aligned(table, right=range(2, len(table[0])))]))
    disturbed = sum(bool(row.get("is_disturbed")) for row in rows)
    if disturbed:
        blocks.append(f"{disturbed} of {len(rows)} rows (marked ?): {DISTURBED}")
    return "\n\n".join(blocks)


def main(argv: list[str] | None = None) -> int:
    """Prints tables or writes pages; returns 2 if the results cannot be used."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSON of pytest-benchmark")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the operators of the files")
    parser.add_argument("--pages", action="store_true", help="write docs/ and README.md's tables")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    try:
        rows = [row for path in options.files for row in read(path)]
        if rows:
            print(printed(rows))
        if options.plot is not None and (of_operators := [r for r in rows if r["suite"] == "operators"]):
            plot(of_operators, options.plot)
            print(f"\nplot: {options.plot}")
        if options.pages:
            write_pages(options.results)
    except (ValueError, OSError) as error:
        print(f"benchmarks.report: error: {error}", file=sys.stderr)
        return 2
    return 0


def write_pages(
    results: Path, page_path: Path = PAGE, everything: Path = EVERYTHING, readme: Path = README
) -> None:
    """Writes docs/results.md, docs/measurements.md and the tables of README.md.

    Raises:
        ValueError: A file is no result.
    """
    rows: list[Row] = []
    kernels: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*/*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("schema") == KERNELS:
            same = kernels.setdefault(content["device"], [])
            step = [content[name] for name in _STEP]
            same[:] = [each for each in same if [each[name] for name in _STEP] != step]
            same.append(content)
        elif path.name != "summary.json":
            rows += read(path)
    text = fill_readme(readme.read_text(encoding="utf-8"), rows)
    pages = {page_path: short_page(rows), everything: page(rows, kernels), readme: text}
    for target, new in pages.items():
        with replacing(target) as file:
            file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
