"""The budgets of kernels, and a check of compiled code against them.

Triton kernels have theirs beside their launch configurations, as ``BUDGETS`` of each family's ``common``,
by compute capability and kernel. They hold for the launches that ``is_budgeted`` names, since the
instructions of an output depend on type and shape, and for the code of Triton 3.7; an older Triton is allowed
more for some kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import triton

from cvt.commands.compile.resources import Resources
from cvt_kernels.ops.triton_launch import Budget

from .bounds import Counts
from .cuda_kernels import CudaCase

_FAMILIES = {
    "conv_projection": "cvt_kernels.ops.conv_projection.triton.common",
    "conv_embedding": "cvt_kernels.ops.conv_embedding.triton.common",
    "conv_linear": "cvt_kernels.ops.conv_linear.triton.common",
    "depthwise_conv_gelu": "cvt_kernels.ops.depthwise_conv_gelu.triton.common",
    "attention": "cvt_kernels.ops.attention.triton.common",
    "layer_norm_mlp": "cvt_kernels.ops.mlp.triton.common",
    "linear_gelu": "cvt_kernels.ops.linear.triton.common",
    "linear_add": "cvt_kernels.ops.linear.triton.common",
    "linear_add_layer_norm": "cvt_kernels.ops.linear.triton.common",
    "quantize_rows": "cvt_kernels.ops.linear_int8.triton.common",
    "layer_norm_quantize": "cvt_kernels.ops.linear_int8.triton.common",
    "gelu_quantize": "cvt_kernels.ops.linear_int8.triton.common",
    "linear_int8": "cvt_kernels.ops.linear_int8.triton.common",
    "linear_float8": "cvt_kernels.ops.linear_int8.triton.common",
    "gather_rows": "cvt_kernels.ops.rows.triton.common",
    "gather_add_layer_norm": "cvt_kernels.ops.rows.triton.common",
    "scatter_rows": "cvt_kernels.ops.rows.triton.common",
}

#: By version of Triton, compute capability and kernel, what is allowed beyond the budget for Triton 3.7.
_OLDER: dict[str, dict[int, dict[str, dict[str, int]]]] = {
    "3.6": {
        90: {
            "conv_embedding_embed": {"instructions_per_output": 35},
            "conv_linear_fwd": {"instructions_per_output": 44},
            "attention_bwd_dkdv": {"instructions_per_tile": 560, "registers": 145},
            "attention_bwd": {"instructions_per_tile": 1000},
            "linear_gelu": {"registers": 250},
            "linear_add": {"registers": 245},
        },
    },
}

_BUDGETED = ("cvt_13", 224), ("segformer_b0", 512)

#: By compute capability and kernel, the budgets of CUDA kernels in bfloat16, here for rows of 64 elements.
CUDA_BUDGETS: dict[int, dict[tuple[str, CudaCase], Budget]] = {
    90: {("layer_norm", CudaCase("identity", 8, 1)): Budget(instructions_per_output=20, registers=64)},
}


def cuda_budget_of(kernel: str, case: CudaCase | None, dtype: str, arch: int) -> Budget | None:
    """Returns the budget of a CUDA kernel, or None."""
    if case is None or dtype != "bfloat16":
        return None
    return CUDA_BUDGETS.get(arch, {}).get((kernel, case))


def budget_of(operator: str, kernel: str, arch: int) -> Budget | None:
    """Returns the budget of a Triton kernel, or None.

    Args:
        operator: The operator, as ``--operator`` names it.
        kernel: The kernel's name in the report.
        arch: Compute capability, 90 for sm_90.
    """
    family = _FAMILIES.get(operator)
    if family is None:
        return None
    budgets: Mapping[int, Mapping[str, Budget]] = importlib.import_module(family).BUDGETS
    by_kernel = budgets.get(arch, {})
    budget = by_kernel.get(kernel.removeprefix(operator).strip("_") or kernel)
    version = ".".join(triton.__version__.split(".")[:2])
    more = _OLDER.get(version, {}).get(arch, {}).get(kernel, {})
    return replace(budget, **more) if budget is not None and more else budget


def is_budgeted(model: str, image_size: int, batch_size: int, dtype: str) -> bool:
    """Returns whether budgets hold for launches of these settings."""
    return (model, image_size) in _BUDGETED and (batch_size, dtype) == (256, "bfloat16")


def excesses(budget: Budget, resources: Resources, counts: Iterable[Counts]) -> list[str]:
    """Returns what is over a budget: each number with its limit.

    Args:
        budget: The budget.
        resources: What the kernel takes of a GPU.
        counts: What was counted for each of its launches.
    """
    numbers: list[tuple[str, float | None, float | None]] = [
        ("registers", resources.registers, budget.registers)
    ]
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
