"""Makes docs/results.md and the README's tables from benchmarks/results/; ``make results`` runs it.

Of each device the newest run counts; of what is measured by itself, such as models besides CvT, the newest
file. The page says which results there are and which there are not.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cvt.commands.bench import contenders as bench_contenders
from cvt.commands.bench import results as bench_results
from cvt.files import replacing
from cvt_kernels.tables import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
README, QUANTIZE = ROOT / "README.md", ROOT / "docs" / "quantize.md"
#: The lines between which a table stands.
BEGIN, END = "<!-- measured: written by make results -->\n", "<!-- end -->\n"
#: The models in the README's table.
_NAMES = {"cvt_13": "CvT-13", "segformer_b0": "SegFormer-B0", "pvt_v2_b2": "PVT v2-B2"}
#: What benchmarks/run.py writes into a summary.
SCHEMA, VERSION = "benchmarks summary", 1
#: What benchmarks/auto.py writes.
AUTO_SCHEMA, AUTO_VERSION = "benchmarks auto", 1
#: What benchmarks/quantization.py writes.
QUANTIZATION_SCHEMA, QUANTIZATION_VERSION = "benchmarks quantization", 1
#: What benchmarks/variants.py writes.
VARIANTS_SCHEMA, VARIANTS_VERSION = "benchmarks variants", 1
#: The files of ``cvt bench``.
BENCHES = ("bench", "bench_bfloat16", "bench_training")
#: Those of other models than CvT.
PYRAMID_BENCHES = (
    *("bench_segformer_b0", "bench_segformer_b0_bfloat16", "bench_pvt_v2_b2", "bench_pvt_v2_b2_bfloat16"),
    "bench_pvt_v2_b2_training",
)
SUITES = {
    "model": "Models",
    "conv_projection": "Projection",
    "attention": "Attention",
    "layer_norm_gelu": "LayerNorm and GELU",
    "linear": "Linear layers",
    "fused": "Linear layers and convolutions with what stands next to them",
    "host": "Host time of a call",
}
#: The contenders that are kernels or models of this project.
OURS = ("cpu", "cuda", "triton", "composed", "int8 cpu", "int8 triton", *bench_contenders.OURS)
INTRODUCTION = """\
# Results

This page is made by `make results` from `benchmarks/results/`, never by hand. `make gpu` measures on an
NVIDIA GPU and `make bench` on the CPU.

Operators: median microseconds and, in parentheses, the share of the ceiling that the same session measured
(of a large copy's bandwidth or a large product's rate, whichever the call comes closer to). Models: images
per second by the wall clock and, in parentheses, the most memory that tensors took beyond weights and images.
The last column sets our fastest against the fastest of the others.

"Beside Hugging Face's model" and "SegFormer and PVT" are what `cvt bench` measured: all contenders in turns,
with the same weights, on real photographs; `hf` is Hugging Face's model as it is, `compile` the same under
`torch.compile` (on a CPU in inference with freezing), `accelerate` a model after `accelerate(freeze=False)`,
`…-frozen` one after `accelerate(freeze=True)`, `openvino` and `onnxruntime` Hugging Face's model in these
runtimes. On a CPU, `accelerate(model)` serves like `…-frozen` in evaluation. In parentheses
stand the quartiles. [How to read `cvt bench`](report.md) says more.
"""


class Run(NamedTuple):
    """The results of one run on one device.

    Attributes:
        summary: How each part went.
        suites: The JSON of pytest-benchmark, by suite.
        benches: The results of ``cvt bench``.
        auto: The comparison of ``auto`` with PyTorch's own forms; None if there is none.
        earlier: The date of the run that measured the operators, if it is an earlier one; else None.
    """

    summary: dict[str, Any]
    suites: dict[str, dict[str, Any]]
    benches: list[bench_results.Results]
    auto: dict[str, Any] | None
    earlier: str | None = None


def load(results: Path) -> list[Run]:
    """Reads the newest run of each device, GPUs first.

    If it has no figures of operators, those of the newest run that has some are taken.

    Raises:
        ValueError: A file is not what benchmarks/run.py writes, or holds a rehearsal.
    """
    newest: dict[str, Path] = {}
    of_operators: dict[str, Path] = {}
    names = (*BENCHES, *SUITES, "auto")
    for path in sorted(results.glob("*/*/summary.json")):
        # Other parts alone, which have sections of their own, are no newer run.
        if any(path.with_name(f"{name}.json").exists() for name in names):
            newest[path.parent.parent.name] = path
        if any(path.with_name(f"{name}.json").exists() for name in (*SUITES, "auto")):
            of_operators[path.parent.parent.name] = path
    runs = []
    for device, path in newest.items():
        summary = read_summary(path)
        older = of_operators.get(device, path)
        files = {name: path.parent / f"{name}.json" for name in BENCHES}
        files |= {name: older.parent / f"{name}.json" for name in SUITES}
        there = {name: file for name, file in files.items() if file.exists()}
        suites = {name: read(there[name]) for name in SUITES if name in there}
        benches = [bench_results.read(there[name]) for name in BENCHES if name in there]
        auto = older.parent / "auto.json"
        tuned = read(auto, AUTO_SCHEMA, AUTO_VERSION) if auto.exists() else None
        earlier = None if older == path else read_summary(older)["date"]
        runs.append(Run(summary, suites, benches, tuned, earlier))
    return sorted(runs, key=lambda run: (run.summary["device_type"] != "cuda", run.summary["device"]))


def read_summary(path: Path) -> dict[str, Any]:
    """Reads how each part of a run went.

    Raises:
        ValueError: The file is not what benchmarks/run.py writes, or holds a rehearsal.
    """
    summary = read(path, SCHEMA, VERSION)
    if summary.get("tiny"):
        raise ValueError(f"{path}: holds a rehearsal (--tiny), which is no result")
    return summary


def read(path: Path, schema: str | None = None, version: int | None = None) -> dict[str, Any]:
    """Reads a JSON object, of a certain schema and version if they are given.

    Until November 2026 the backend of the CPU kernels was called "native"; here it gets its name of now.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(re.sub(r'"((?:int8 )?)native"(?!: "\d)', r'"\1cpu"', text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no object")
    for name, expected in (("schema", schema), ("version", version)):
        if expected is not None and content.get(name) != expected:
            raise ValueError(f"{path}: got {name} {content.get(name)!r}, expected {expected!r}")
    return content


def page(runs: list[Run], others: Sequence[str] = ()) -> str:
    """Returns the page; ``others`` are its sections of what is measured by itself."""
    types = {run.summary["device_type"] for run in runs}
    lacking = [
        f"**There are no {name} results yet.** `{command}` makes them."
        for kind, name, command in (("cuda", "GPU", "make gpu"), ("cpu", "CPU", "make bench"))
        if kind not in types
    ]
    return "\n\n".join([INTRODUCTION.rstrip(), *lacking, *(section(run) for run in runs), *others]) + "\n"


def section(run: Run) -> str:
    """Returns the section of one device."""
    summary = run.summary
    facts = [f"torch {summary['torch']}", f"triton {summary['triton']}"]
    facts += [f"CUDA {summary['cuda']}"] if summary["cuda"] else [f"{summary['threads']} threads"]
    facts.append(f"commit {summary['commit'][:9]}")
    lines = [f"## {summary['device']}", f"{summary['date']}, {', '.join(facts)}."]
    lines += [] if run.earlier is None else [f"Operators, and what stands below them, are of {run.earlier}."]
    ceilings: dict[str, float] = {}
    for suite in run.suites.values():
        ceilings |= suite["ceilings"]
    if ceilings:
        lines.append("Ceilings: " + ", ".join(ceiling(*item) for item in sorted(ceilings.items())) + ".")
    wanting = {name: part["status"] for name, part in summary["parts"].items() if part["status"] != "passed"}
    if wanting:
        lines.append("Parts that did not pass: " + ", ".join(map(": ".join, wanting.items())) + ".")
    if run.benches:
        lines += ["### Beside Hugging Face's model", *map(beside_huggingface, run.benches)]
    if run.auto is not None and run.auto["rows"]:
        lines += ["### `auto` beside PyTorch's own", beside_pytorch(run.auto)]
    for name, title in SUITES.items():
        if name not in run.suites:
            continue
        rows = [benchmark["extra_info"] for benchmark in run.suites[name].get("benchmarks", [])]
        rows = [row for row in rows if "seconds" in row]  # the others failed
        lines += [f"### {title}", table(rows) if rows else "Nothing was measured."]
    return "\n\n".join(lines)


def beside_pytorch(auto: dict[str, Any]) -> str:
    """Returns a table of what ``auto`` took and gained, with a row for each operator and dtype."""
    rows_of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in auto["rows"]:
        rows_of.setdefault((row["operator"], row["dtype"]), []).append(row)
    table_rows = [["operator", "dtype", "calls", "`auto` took", "median", "worst"]]
    for (operator, dtype), rows in sorted(rows_of.items()):
        took = collections.Counter(row["chosen"] for row in rows).most_common()
        worst = min(rows, key=lambda row: row["ratio"])
        median = statistics.median(row["ratio"] for row in rows)
        where = f"{worst['case']}, {worst['direction']}, batch {worst['batch']}"
        cells = [f"`{operator}`", dtype, str(len(rows)), ", ".join(f"{name} {n}" for name, n in took)]
        table_rows.append([*cells, f"{median:.2f}", f"{worst['ratio']:.2f} ({where})"])
    explained = (
        f"{len(auto['rows'])} of {auto['calls']} calls of CvT-13's operators were measured. The ratio of a "
        "call is the time of the fastest of PyTorch's own forms, called directly, over that of the public "
        "function: above 1 `auto` is faster. Here stand the median and the worst ratio of the calls."
    )
    return "\n\n".join([explained, "\n".join(markdown(table_rows))])


def beside_huggingface(results: bench_results.Results) -> str:
    """Returns a table of one run of ``cvt bench``, with a row for each batch size and contender."""
    batches = [(batch, {row["contender"]: row for row in batch["rows"]}) for batch in results["batches"]]
    asked = ("compile", "onnxruntime", "openvino", "openvino-int8")
    peers = ["hf", *(peer for peer in asked if any(peer in rows for _, rows in batches))]
    lines = bench_results.products(results)
    heads = ["batch", "contender", "images/s", *(f"× {peer}" for peer in peers)]
    table_rows = [[*heads, *(["% of product"] if lines else []), "memory, of hf's"]]
    for batch, rows in batches:
        size = batch["batch_size"]
        for name, row in rows.items():
            cells = [str(size), f"`{name}`", number(size / statistics.median(row["seconds"]))]
            cells += [beside(rows, name, peer) for peer in peers]
            cells += [f"{100 * bench_results.share_of_product(batch, row):.0f}"] if lines else []
            table_rows.append([*cells, share_of_memory(rows, name)])
    first = [[cell or "–" for cell in row] for row in bench_results.first_rows(results)]
    tables = ["\n".join(markdown(rows)) for rows in (table_rows, first) if rows]
    failed = [
        f"`{key}` was not measured: {about['note']}."
        for key, about in results["contenders"].items()
        if about["note"] is not None
    ]
    return "\n\n".join([f"{bench_results.heading(results)}:", *tables, *failed, *lines])


def beside(rows: dict[str, dict[str, Any]], name: str, peer: str) -> str:
    """Returns the speed of a contender as a multiple of a peer's, with its quartiles."""
    if name == peer or peer not in rows:
        return "1" if name == peer else "–"
    return str(bench_results.ratio(rows[name]["seconds"], rows[peer]["seconds"]))


#: The columns of the README's table: peers, and what accelerate(model) serves on a CPU.
_COLUMNS = {
    "compile": "`torch.compile`",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "accelerate-frozen": "accelerated",
    "openvino-int8": "int8: OpenVINO",
    "accelerate-int8": "int8: accelerated",
}


def _measured_as(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """Returns the contender whose figures a column shows: the blocks' if nothing is frozen."""
    return "accelerate" if name == "accelerate-frozen" and name not in rows else name


def readme_table(benches: Iterable[bench_results.Results]) -> str:
    """Returns the README's table: the results of ``cvt bench`` on a device, beside Hugging Face's.

    It has the columns of contenders that were measured, and the first two batch sizes.
    """
    benches = list(benches)
    measured = {
        row["contender"] for results in benches for batch in results["batches"] for row in batch["rows"]
    }
    columns = {key: head for key, head in _COLUMNS.items() if key in measured or key == "accelerate-frozen"}
    table_rows = [["", "batch", "Hugging Face's, images/s", *columns.values(), "memory, accelerated"]]
    for results in benches:
        config = results["config"]
        kind = f"{_NAMES.get(config['model'], config['model'])}, {config['dtype']}"
        kind += ", training step" if config["train"] else ""
        for batch in results["batches"][:2]:
            rows = {row["contender"]: row for row in batch["rows"]}
            rate = number(batch["batch_size"] / statistics.median(rows["hf"]["seconds"]))
            speeds = [times_as_fast(rows, _measured_as(name, rows)) for name in columns]
            memory = share_of_memory(rows, _measured_as("accelerate-frozen", rows))
            table_rows.append([kind, str(batch["batch_size"]), rate, *speeds, memory])
    return "\n".join(markdown(table_rows))


def times_as_fast(rows: dict[str, dict[str, Any]], name: str) -> str:
    """Returns the speed of a contender as a multiple of Hugging Face's."""
    if name not in rows:
        return "–"
    return f"{bench_results.ratio(rows[name]['seconds'], rows['hf']['seconds']).median:.2f} ×"


def share_of_memory(rows: dict[str, dict[str, Any]], name: str) -> str:
    """Returns the peak memory of a contender as a part of Hugging Face's."""
    if name not in rows:
        return "–"
    ours, theirs = rows[name]["peak_bytes"], rows["hf"]["peak_bytes"]
    return f"{ours / theirs:.2f}" if ours is not None and theirs else "–"


def fill_readme(text: str, runs: list[Run], pyramids: dict[str, list[bench_results.Results]]) -> str:
    """Puts the table of the newest run of CvT on a CPU, and of other models on it, into the README.

    Raises:
        ValueError: The marks are not there.
    """
    measured = [run for run in runs if run.benches and run.summary["device_type"] == "cpu"]
    if not measured:
        return text
    newest = max(measured, key=lambda run: run.summary["date"])
    machine = newest.benches[0]["machine"]
    others = [each for each in itertools.chain(*pyramids.values()) if each["machine"] == machine]
    return fill("README.md", text, readme_table([*newest.benches, *others]))


def fill(name: str, text: str, content: str, mark: str = BEGIN) -> str:
    """Puts content between the marks of a page.

    Raises:
        ValueError: The marks are not there.
    """
    before, begin, rest = text.partition(mark)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{name}: has no {mark.strip()} and {END.strip()}")
    return before + begin + content + "\n" + end + after


# Other models ---------------------------------------------------------------------------------------------


def pyramids_by_device(results: Path) -> dict[str, list[bench_results.Results]]:
    """Returns the newest results of ``cvt bench`` for models besides CvT, by device.

    Raises:
        ValueError: A file is not what ``cvt bench`` writes, or of a rehearsal.
    """
    found: dict[str, list[bench_results.Results]] = {}
    for name in PYRAMID_BENCHES:
        for device, path in newest_by_device(results, name).items():
            if (summary := path.with_name("summary.json")).exists():
                read_summary(summary)
            found.setdefault(device, []).append(bench_results.read(path))
    return found


def pyramids_of(benches: list[bench_results.Results]) -> str:
    """Returns the section of a device."""
    facts, versions = benches[0]["machine"], benches[0]["versions"]
    device = (facts["gpus"] or [facts["cpu"].partition(",")[0]])[0]
    dates = sorted({each["date"][:10] for each in benches})
    used = f"torch {versions['torch']}, transformers {versions['transformers']}"
    lines = [f"## SegFormer and PVT on {device}", f"{' and '.join(dates)}, {used}."]
    return "\n\n".join([*lines, *map(beside_huggingface, benches)])


# Variants -------------------------------------------------------------------------------------------------


def newest_by_device(results: Path, name: str) -> dict[str, Path]:
    """Returns the newest file of a name of every device."""
    return {path.parent.parent.name: path for path in sorted(results.glob(f"*/*/{name}.json"))}


def variants_by_device(results: Path) -> list[str]:
    """Returns a section for the newest figures of each device about variants that no public CvT has.

    Raises:
        ValueError: A file is not what benchmarks/variants.py writes.
    """
    newest = newest_by_device(results, "variants").values()
    return [variants_of(read(path, VARIANTS_SCHEMA, VARIANTS_VERSION), path) for path in newest]


def variants_of(content: dict[str, Any], path: Path) -> str:
    """Returns the section of a file."""
    facts = f"{path.parent.name}, torch {content['torch']}, {content['threads']} threads."
    lines = [f"## Variants on {content['device']}", facts]
    for name, rows in content["sections"].items():
        tables = [list(group) for _, group in itertools.groupby(rows, key=list)]
        lines += [f"### {name.replace('_', ' ').capitalize()}"] if tables else []
        for table in tables:
            values = [[entry(value) for value in row.values()] for row in table]
            lines.append("\n".join(markdown([list(table[0]), *values])))
    return "\n\n".join(lines)


def entry(value: str | float | None) -> str:
    """Returns a value of such a table: a text as it is, a number with four digits or more."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# 8-bit layers ---------------------------------------------------------------------------------------------


def fill_quantize(text: str, results: Path) -> str:
    """Puts the newest figures of every device about 8-bit layers between the marks of their page.

    Raises:
        ValueError: The marks are not there, or a file is not what benchmarks/quantization.py writes.
    """
    parts = []
    for path in newest_by_device(results, "quantization").values():
        content = read(path, QUANTIZATION_SCHEMA, QUANTIZATION_VERSION)
        threads, date = content["threads"], path.parent.name
        parts += [f"{content['device']}, {threads} threads, torch {content['torch']}, {date}:"]
        parts += ["\n".join(markdown(speed_of_8_bits(content["speed"])))]
        parts += ["\n".join(markdown(accuracy_of_8_bits(content["accuracy"])))]
    return fill("docs/quantize.md", text, "\n" + "\n\n".join(parts) + "\n") if parts else text


def speed_of_8_bits(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns a table of the speed of frozen models, with a row for each instruction set and batch size."""
    groups: dict[tuple[str | None, int], dict[str, float]] = {}
    for row in rows:
        seconds = groups.setdefault((row["set"], row["batch"]), {})
        seconds[row["model"]] = statistics.median(row["seconds"])
    others = list(dict.fromkeys(row["model"] for row in rows if row["model"] != "float32"))
    table_rows = [["instructions", "batch", "float32, images/s", *others]]
    for (instruction_set, batch), seconds in groups.items():
        ratios = [
            f"{seconds['float32'] / seconds[name]:.2f} ×" if name in seconds else "–" for name in others
        ]
        name = "newest" if instruction_set is None else f"`{instruction_set}`"
        table_rows.append([name, str(batch), number(batch / seconds["float32"]), *ratios])
    return table_rows


def accuracy_of_8_bits(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns a table of what models lose, with a row for each model and scheme."""
    heads = ["model", "scheme", "logits, dB", "top-1 before and after", "top-5 before and after", "file"]
    table_rows = [heads]
    for row in rows:
        tops = [f"{row[top][0]:.2%}, {row[top][1]:.2%}" if top in row else "–" for top in ("top1", "top5")]
        size = f"{row['bytes'][1] / row['bytes'][0]:.3f} of float32" if "bytes" in row else "–"
        table_rows.append([row["model"], row["scheme"], f"{row['sqnr']:.1f}", *tops, size])
    return table_rows


# Words ----------------------------------------------------------------------------------------------------


def ceiling(name: str, rate: float) -> str:
    """Returns a ceiling in words."""
    if name == "copy":
        return f"copy {rate / 1e9:,.0f} GB/s"
    return f"{name.removeprefix('matmul_')} products {rate / 1e12:.3g} TFLOP/s"


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a table with a row for each case and a column for each contender."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cases: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["dtype"], row["batch"]), {})[row["contender"]] = row
    table_rows = [["case", "dtype", "batch", *contenders, "gain"]]
    for (case, dtype, batch), row_of in cases.items():
        cells = [cell(row_of[name]) if name in row_of else "–" for name in contenders]
        table_rows.append([case, dtype, str(batch), *cells, gain(row_of)])
    return "\n".join(markdown(table_rows))


def cell(row: dict[str, Any]) -> str:
    """Returns a speed, and the figure that it is to be seen beside."""
    if row["suite"] == "model":
        return f"{number(row['images_per_second'])} ({row['peak_memory_bytes'] / 2**20:,.0f} MiB)"
    if row["suite"] == "host":
        count, microseconds = row.get("operators"), 1e6 * row["seconds"]
        each = f" ({count} operators, {number(microseconds / count)} each)" if count else ""
        return number(microseconds) + each
    return f"{number(1e6 * row['seconds'])} ({row['share_of_ceiling']:.0%})"


def number(value: float) -> str:
    """Returns a number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gain(row_of: dict[str, dict[str, Any]]) -> str:
    """Returns how many times as fast our fastest is as the fastest of the others."""
    ours = [row["seconds"] for name, row in row_of.items() if name in OURS]
    others = [row["seconds"] for name, row in row_of.items() if name not in OURS]
    return f"{min(others) / min(ours):.2f}×" if ours and others else "–"


def main(argv: list[str] | None = None) -> int:
    """Writes the page; returns 2 if the results cannot be used."""
    parser = argparse.ArgumentParser(prog="benchmarks/tabulate_results.py", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--quantize", type=Path, default=QUANTIZE)
    options = parser.parse_args(argv)
    try:
        runs = load(options.results)
        pyramids = pyramids_by_device(options.results)
        readme = fill_readme(options.readme.read_text(encoding="utf-8"), runs, pyramids)
        quantize = fill_quantize(options.quantize.read_text(encoding="utf-8"), options.results)
        others = [*map(pyramids_of, pyramids.values()), *variants_by_device(options.results)]
        pages = {options.page: page(runs, others), options.readme: readme, options.quantize: quantize}
        for path, text in pages.items():
            with replacing(path) as file:
                file.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"benchmarks/tabulate_results.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
