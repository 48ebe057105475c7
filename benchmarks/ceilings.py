"""Measures the ceilings of this machine: the rates that a large copy and large matrix products reach.

``python -m benchmarks.ceilings FILE`` writes bytes or operations per second as JSON.
"""

import torch

from . import suites


def main() -> None:
    """Measures the ceilings, prints them and writes them."""
    options = suites.script_parser("ceilings", __doc__).parse_args()
    suites.TINY = options.tiny
    suites.copy_bandwidth()
    for dtype in dict.fromkeys([torch.float32, *suites.dtypes()]):
        suites.product_rate(suites.short(dtype))
    for name, rate in suites.CEILINGS.items():
        unit = "bytes" if name == "copy" else "operations"
        print(f"{name}: {rate / 1e9:,.0f} · 10⁹ {unit} per second")
    suites.write_report(options.path, suites.CEILINGS)


if __name__ == "__main__":
    main()
