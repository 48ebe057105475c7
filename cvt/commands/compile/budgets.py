"""The budgets of kernels, and which of them the code of a kernel exceeds.

Those of Triton kernels stand beside their launch configurations, as ``BUDGETS`` of each family's ``common``: by compute
capability and kernel. They hold for bfloat16 and the launches that ``is_budgeted`` names, since the instructions of an
output depend on both.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

from cvt_kernels.ops.triton_launch import Budget

from .bounds import Counts
from .resources import Compiled

_FAMILIES = {
    "conv_projection": "cvt_kernels.ops.conv_projection.triton.common",
    "attention": "cvt_kernels.ops.attention.triton.common",
}


def budget_of(operator: str, kernel: str, arch: int) -> Budget | None:
    """Returns the budget of a Triton kernel; None if it has none.

    Args:
        operator: The operator, as ``--operator`` names it.
        kernel: The kernel's name in the report.
        arch: Compute capability, 90 for sm_90.
    """
    family = _FAMILIES.get(operator)
    if family is None:
        return None
    budgets: Mapping[int, Mapping[str, Budget]] = importlib.import_module(family).BUDGETS
    return budgets.get(arch, {}).get(kernel.removeprefix(operator).strip("_"))


def is_budgeted(model: str, image_size: int, batch_size: int, dtype: str) -> bool:
    """Says whether budgets hold for launches of these settings."""
    return (model, image_size, batch_size, dtype) == ("cvt_13", 224, 256, "bfloat16")


def excesses(budget: Budget, compiled: Compiled, counts: Iterable[Counts]) -> list[str]:
    """Returns what is over a budget: each number with its limit.

    Args:
        budget: The budget.
        compiled: The kernel.
        counts: What was counted for each of its launches.
    """
    registers = compiled.resources.registers
    numbers = [("registers", registers, budget.registers)]
    for each in counts:
        numbers += [
            ("instructions per output", each.instructions_per_output, budget.instructions_per_output),
            ("instructions per 64 × 64 scores", each.instructions_per_tile, budget.instructions_per_tile),
        ]
    return list(
        dict.fromkeys(
            f"over its budget: {number:.4g} {name}, {limit:g} allowed"
            for name, number, limit in numbers
            if number is not None and limit is not None and number > limit
        )
    )
