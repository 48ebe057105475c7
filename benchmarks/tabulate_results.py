"""Makes docs/results.md and the README's tables from benchmarks/results/; ``make results`` runs it.

Of each device the newest run counts; of what is measured by itself, such as models besides CvT, the newest
file. The page says which results there are and which there are not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cvt.files import replacing
from cvt.tools.commands.bench import results as bench_results
from cvt_kernels.tables import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
README = ROOT / "README.md"
#: The lines between which a table stands.
BEGIN, END = "<!-- measured: written by make results -->\n", "<!-- end -->\n"
BEGIN_GPU = "<!-- measured on a GPU: written by make results -->\n"
#: The models in the README's table.
_NAMES = {
    "cvt_13": "CvT-13",
    "cvt_w24": "CvT-W24",
    "segformer_b0": "SegFormer-B0",
    "pvt_v2_b2": "PVT v2-B2",
}
#: What benchmarks/run.py writes into a summary.
SCHEMA, VERSION = "benchmarks summary", 1
#: What benchmarks/variants.py writes.
VARIANTS_SCHEMA, VARIANTS_VERSION = "benchmarks variants", 1
#: The files of ``cvt bench``.
BENCHES = ("bench", "bench_bfloat16", "bench_training")
#: Those of other models than CvT.
PYRAMID_BENCHES = (
    *("bench_segformer_b0", "bench_segformer_b0_bfloat16", "bench_pvt_v2_b2", "bench_pvt_v2_b2_bfloat16"),
    "bench_pvt_v2_b2_training",
)
#: What benchmarks/lab.py writes.
LAB_SCHEMA, LAB_VERSION = "benchmarks lab", 1
#: The ways to run a model that are this project's: those of which the first that was measured stands for it,
#: and those that have rows of their own, with what their rows are called.
OURS = ("graphed", "frozen", "live-graphed", "live")
OTHERS = {
    "live": "without freezing",
    "live-graphed": "replayed as CUDA graphs",
    "live-compile": "under `torch.compile`",
    "int8": "int8",
    "float8": "float8",
}
INTRODUCTION = """\
# Results

This page is made by `make results` from `benchmarks/results/`, never by hand. `make gpu` measures on an
NVIDIA GPU and `make bench` on the CPU. What waits for a GPU is in `benchmarks/gpu_queue.md`.

On a GPU: milliseconds per batch by events around calls that follow one another and, in parentheses, by the
clock, with a synchronization before and after each call. `torch.compile` has its best mode for the size:
`reduce-overhead` below 64 images, the default from there on. Ours is `accelerate(model, freeze=True)`,
replayed as a CUDA graph; in training, and "without freezing", `accelerate(model)`.

On a CPU: "Beside Hugging Face's model" and "SegFormer and PVT" are what `cvt bench` measured: all
contenders in turns, with the same weights, on real photographs; `hf` is Hugging Face's model as it is,
`compile` the same under `torch.compile` with freezing, `accelerate` a model after
`accelerate(freeze=False)`, `…-frozen` one after `accelerate(freeze=True)`, `openvino` and `onnxruntime`
Hugging Face's model in these runtimes. `accelerate(model)` serves like `…-frozen` in evaluation. In
parentheses stand the quartiles. [How to read `cvt bench`](report.md) says more.
"""


class Run(NamedTuple):
    """The results of one run on one device.

    Attributes:
        summary: How each part went.
        benches: The results of ``cvt bench``.
        lab: What the parts of ``make gpu`` wrote, in all runs on the device, the oldest first; ``run`` names
            each one's.
    """

    summary: dict[str, Any]
    benches: list[bench_results.Results]
    lab: list[dict[str, Any]]


def load(results: Path) -> list[Run]:
    """Reads the newest run of each device, GPUs first.

    Raises:
        ValueError: A file is not what benchmarks/run.py writes, or holds a rehearsal.
    """
    newest: dict[str, Path] = {}
    for path in sorted(results.glob("*/*/summary.json")):
        # Other models alone, which have sections of their own, are no newer run.
        others = {"summary", "variants", "autotune", *PYRAMID_BENCHES}
        if any(file.stem not in others for file in path.parent.glob("*.json")):
            newest[path.parent.parent.name] = path
    runs = []
    for path in newest.values():
        summary = read_summary(path)
        benches = [
            bench_results.read(file) for name in BENCHES if (file := path.with_name(f"{name}.json")).exists()
        ]
        files = path.parent.parent.glob("*/*.json") if summary["device_type"] == "cuda" else []
        lab = [
            read(file, LAB_SCHEMA, LAB_VERSION) | {"run": file.parent.name}
            for file in sorted(files)
            if file.name != path.name
        ]
        runs.append(Run(summary, benches, lab))
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

    Raises:
        ValueError: The file holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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
    wanting = {name: part["status"] for name, part in summary["parts"].items() if part["status"] != "passed"}
    if wanting:
        lines.append("Parts that did not pass: " + ", ".join(map(": ".join, wanting.items())) + ".")
    if run.lab:
        lines += ["### Models", models_table(run.lab)]
        newest = {_step_of(content): content for content in run.lab if "ceilings" in content}
        lines += [text for content in newest.values() for text in kernels_of(content)]
    if run.benches:
        lines += ["### Beside Hugging Face's model", *map(beside_huggingface, run.benches)]
    return "\n\n".join(lines)


# On a GPU -------------------------------------------------------------------------------------------------


def models_table(lab: Sequence[dict[str, Any]], *, brief: bool = False) -> str:
    """Returns the table of models: a row for each, with its dtype and batch size.

    A ``brief`` one has what stands for this project alone, where torch.compile was measured too. What was not
    measured in the newest run with a way of ours comes from an earlier one, with a mark.
    """
    runs_of: dict[tuple[str, int], dict[str, dict[str, dict[str, Any]]]] = {}
    for content in lab:
        for row in content["rows"]:
            if "events" in row:
                facts = content | row
                runs = runs_of.setdefault((name_of(facts), facts["batch"]), {})
                runs.setdefault(facts["run"], {})[facts["way"]] = row
    table_rows = [["", "batch", "eager", "`torch.compile`", "ours", "× eager", "× `torch.compile`"]]
    earlier: set[str] = set()
    for (name, batch), runs in sorted(runs_of.items(), key=lambda item: (item[0][0], item[0][1])):
        newest = max((run for run, ways in runs.items() if set(OURS) & set(ways)), default=max(runs))
        ways = {way: (row, run) for run in sorted(runs) for way, row in runs[run].items()}
        first = next((way for way in OURS if way in runs[newest]), None)
        named = {name: first, **{f"{name}, {told}": way for way, told in OTHERS.items() if way != first}}
        for told, way in named.items():
            if way not in ways or (brief and (way != first or "compile" not in ways)):
                continue
            ours, run = ways[way]
            cells, ratios = [], []
            for peer, peer_run in (ways.get(each, (None, run)) for each in ("eager", "compile")):
                mark = "" if peer_run == run else "†"
                earlier |= {min(peer_run, run)} if mark else set()
                cells.append(milliseconds(peer) + mark if peer else "–")
                ratio = peer and peer["events"]["ms"] / ours["events"]["ms"]
                ratios.append(f"{ratio:.2f}{mark}" if ratio else "–")
            table_rows.append([told, str(batch), *cells, milliseconds(ours), *ratios])
    table = "\n".join(markdown(table_rows))
    if not earlier:
        return table
    return f"{table}\n\n† from a run of {', '.join(sorted(earlier))}, on another machine of the same kind."


def _step_of(content: dict[str, Any]) -> tuple[Any, ...]:
    return content["train"], content["way"], content["batch_size"][0]


def name_of(facts: dict[str, Any]) -> str:
    """Returns what was measured, in words."""
    name = _NAMES.get(facts["model"], facts["model"])
    name += f" {facts['image_size']}²" if facts["image_size"] else ""
    name += f", {facts['dtype']}" + (" with TF32" if facts["tf32"] else "")
    return f"{name}, training step" if facts["train"] else name


def milliseconds(row: dict[str, Any]) -> str:
    """Returns the times of a row: by events and, if it was measured, by the clock."""
    waited = f" ({number(row['clock']['ms'])})" if "clock" in row else ""
    return number(row["events"]["ms"]) + waited


def kernels_of(content: dict[str, Any]) -> list[str]:
    """Returns a heading, a sentence and a table of the kernels of a step, the longest first."""
    step = "a training step" if content["train"] else "a forward"
    ceilings = content["ceilings"]
    heading = f"### Kernels of {step}, {content['way']}, batch {content['batch_size'][0]}"
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
    table_rows = [["kernel", "launches", "µs", "floor, µs", "share of the floor"]]
    for name, (count, us, floor) in sorted(sums.items(), key=lambda item: -item[1][1])[:_LONGEST]:
        share = f"{floor / us:.0%}" if floor else "–"
        table_rows.append([f"`{name}`", f"{count:.0f}", number(us), number(floor) if floor else "–", share])
    return [heading, f"{told}.", "\n".join(markdown(table_rows))]


_LONGEST = 20  # rows of such a table


def short(kernel: str) -> str:
    """Returns the beginning of a kernel's name."""
    return kernel.removeprefix("void ").split("<")[0][:60]


# On a CPU -------------------------------------------------------------------------------------------------


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

    It has the columns of contenders that were measured, and the second batch size, or the only one.
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
        for batch in results["batches"][1:2] or results["batches"]:
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
    """Puts the tables into the README: of a GPU, and of the newest run of CvT on a CPU with other models.

    Raises:
        ValueError: The marks are not there.
    """
    on_gpu = [run for run in runs if run.lab]
    if on_gpu:
        newest = max(on_gpu, key=lambda run: run.summary["date"])
        text = fill("README.md", text, models_table(newest.lab, brief=True), BEGIN_GPU)
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


# Words ---------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Returns a number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(argv: list[str] | None = None) -> int:
    """Writes the page; returns 2 if the results cannot be used."""
    parser = argparse.ArgumentParser(prog="benchmarks/tabulate_results.py", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(argv)
    try:
        runs = load(options.results)
        pyramids = pyramids_by_device(options.results)
        readme = fill_readme(options.readme.read_text(encoding="utf-8"), runs, pyramids)
        others = [*map(pyramids_of, pyramids.values()), *variants_by_device(options.results)]
        pages = {options.page: page(runs, others), options.readme: readme}
        for path, text in pages.items():
            with replacing(path) as file:
                file.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"benchmarks/tabulate_results.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
