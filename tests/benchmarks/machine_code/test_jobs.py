"""The specializations that users wait for, counted without compiling any."""

import json

from tests.processes import run_python

#: Kernel → the most specializations that batches from 1 to 512 may need, in inference and in training.
SPECIALIZATIONS = {
    "inference": {
        "_conv_projection_sliding_fwd_kernel": 3,
        "_attention_fwd_kernel": 2,
        "_attention_fwd_loop_kernel": 1,
    },
    "training": {
        "_conv_projection_sliding_fwd_kernel": 3,
        "_conv_projection_sliding_stats_kernel": 3,
        "_merge_stats_kernel": 1,
        "_update_running_kernel": 1,
        "_conv_projection_sliding_bwd_sums_kernel": 3,
        "_sum_regions_kernel": 2,
        "_conv_projection_sliding_bwd_conv_kernel": 3,
        "_conv_projection_sliding_bwd_input_kernel": 3,
        "_attention_fwd_kernel": 2,
        "_attention_fwd_loop_kernel": 1,
        "_attention_bwd_kernel": 1,
        "_attention_bwd_dq_kernel": 2,
        "_attention_bwd_dkdv_kernel": 2,
    },
}


def test_specializations_of_batches():
    """Counts in a process of its own, since the interpreter's kernels have no specializations."""
    code = (
        "import json; from benchmarks.machine_code.jobs import count_specializations as count;"
        "batches = (*range(1, 34), 64, 128, 255, 256, 512);"
        "print(json.dumps({mode: count(mode, batches) for mode in ('inference', 'training')}))"
    )
    counts = json.loads(run_python(code, TRITON_INTERPRET="0").stdout)
    grown = {
        (mode, kernel): count
        for mode, kernels in counts.items()
        for kernel, count in kernels.items()
        if count > SPECIALIZATIONS[mode].get(kernel, 0)
    }
    assert grown == {}
