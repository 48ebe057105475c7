"""The Triton kernels compiled for real GPUs, without one."""

import json
import os
import subprocess
import sys

import pytest

# In a process of its own, since the other tests import the kernels for the interpreter.
CODE = """
import json, sys
import torch
from cvt_kernels import aot
from cvt_kernels import conv_projection_triton as kernels

arch, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
rows = []
for grid, channels, class_tokens in [((56, 56), 64, 0), ((14, 14), 384, 1)]:
    geometry = kernels.Geometry(grid, (3, 3, 3), (1, 2, 2), (1, 1, 1), (1, 1, 1), (1e-5,) * 3)
    meta = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")
    x = meta(256, grid[0] * grid[1] + class_tokens, channels)
    weights = [meta(channels, 1, 3, 3)] * 3
    vectors = [meta(channels, dtype=torch.float32)] * 3
    dys = [meta(256, h * w + class_tokens, channels) for h, w in geometry.output_grids]
    with aot.record(kernels) as launches:
        kernels.forward(x, geometry, weights, *[vectors] * 4)
        kernels.statistics(x, geometry, weights)
        sums = kernels.backward_sums(x, geometry, weights, vectors, vectors, dys)
        dconvs, _ = kernels.backward_conv(x, geometry, weights, *[vectors] * 3, dys, sums, [1, 1, 1])
        kernels.backward_input(geometry, weights, dconvs, dys)
    for launch in launches:
        rows.append((launch.kernel.__name__, aot.compile_launch(launch, arch)._asdict()))
print(json.dumps(rows))
"""


@pytest.mark.parametrize(("arch", "dtype"), [(80, "bfloat16"), (90, "bfloat16")])
def test_conv_projection_compiles_without_spills(arch, dtype):
    """CvT-13's first and last stage at 224², whose launches differ in tile columns and class token."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", CODE, str(arch), dtype]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert {name for name, _ in rows} == {
        *(
            f"_conv_projection_{part}_kernel"
            for part in ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input")
        ),
        "_merge_stats_kernel",
        "_sum_regions_kernel",
    }
    for name, resources in rows:
        assert (resources["stack"], resources["local"], resources["spills"]) == (0, 0, 0), (name, resources)
        assert resources["shared"] <= 99 * 1024
        if name.startswith("_conv_projection"):
            widths = ("64", "128") if name == "_conv_projection_bwd_conv_kernel" else ("128",)
            assert any(load.endswith(widths) for load in resources["loads"]), (name, resources)
        if name in ("_conv_projection_fwd_kernel", "_conv_projection_bwd_input_kernel"):
            assert any(store.endswith("128") for store in resources["stores"]), (name, resources)
