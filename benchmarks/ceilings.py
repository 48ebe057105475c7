"""Measures the ceilings of this machine: the rates that a large copy and large matrix products reach.

``python -m benchmarks.ceilings FILE`` writes bytes or operations per second as JSON.
"""

import argparse
import json
from pathlib import Path

import torch

from . import suites


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="benchmarks.ceilings", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    suites.TINY = options.tiny
    suites.copy_bandwidth()
    for dtype in dict.fromkeys([torch.float32, *suites.dtypes()]):
        suites.product_rate(suites.short(dtype))
    for name, rate in suites.CEILINGS.items():
        unit = "bytes" if name == "copy" else "operations"
        print(f"{name}: {rate / 1e9:,.0f} · 10⁹ {unit} per second")
    options.path.write_text(json.dumps(suites.CEILINGS, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
