"""The Triton kernels compiled for real GPUs, without one."""

import json
import os
import subprocess
import sys

import pytest

from cvt_kernels import aot


def compile_ahead(*arguments, prelude="pass"):
    """In a process of its own, since the other tests import the kernels for the interpreter."""
    code = f"import sys; from cvt_kernels import aot; {prelude}; sys.exit(aot.main())"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# The last stage has a class token and the narrowest tiles, the first what CvT spends most time on. python -m
# cvt_kernels.aot without arguments compiles all shapes and dtypes, in a quarter of an hour.
@pytest.mark.parametrize(
    ("arch", "dtype", "stage"),
    [(80, "bfloat16", 3), (90, "bfloat16", 1), (100, "bfloat16", 3), (90, "float32", 3)],
)
def test_conv_projection_compiles_without_spills(arch, dtype, stage):
    result = compile_ahead(
        "--operator", "conv_projection", "--arch", str(arch), "--dtype", dtype,
        "--model", "cvt_13 at 224", "--stage", str(stage), "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["kernel"]: row for row in map(json.loads, result.stdout.splitlines())}
    large = [
        f"_conv_projection_{part}_kernel" for part in ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input")
    ]
    assert set(rows) == {*large, "_merge_stats_kernel", "_update_running_kernel", "_sum_regions_kernel"}
    for name, row in rows.items():
        assert (row["stack"], row["local"], row["spills"]) == (0, 0, 0), row
        assert row["shared"] <= 99 * 1024
        assert any(load.endswith("128") for load in row["loads"]) or name not in large, row
    for part in ("fwd", "bwd_conv", "bwd_input"):
        assert any(store.endswith("128") for store in rows[f"_conv_projection_{part}_kernel"]["stores"])


@pytest.mark.parametrize(
    ("arch", "dtype", "operator"),
    [
        (80, "bfloat16", "attention"),
        (90, "bfloat16", "attention"),
        (90, "float16", "attention_with_bias"),
        (90, "float32", "attention"),
        (100, "bfloat16", "attention"),
    ],
)
def test_attention_compiles_without_spills(arch, dtype, operator):
    """CvT-13's three stages at 224²: the products on tensor cores, but for float32."""
    result = compile_ahead(
        "--operator", operator, "--arch", str(arch), "--dtype", dtype, "--model", "cvt_13 at 224", "--json"
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    names = [
        (row["stage"], row["kernel"].removeprefix("_attention_").removesuffix("_kernel")) for row in rows
    ]
    biased = operator == "attention_with_bias"
    looping = dtype == "float32" or biased  # what does not fit on the chip at once, see keys_on_chip
    assert [name for name in names if name[1] != "bwd_bias"] == [
        *((1, name) for name in ("fwd_loop", "bwd_dq", "bwd_dkdv")),
        *((2, name) for name in ("fwd_loop" if looping else "fwd", "bwd_dq", "bwd_dkdv")),
        *((3, name) for name in ("fwd", "bwd")),
    ]
    assert [name for name in names if name[1] == "bwd_bias"] == [(n, "bwd_bias") for n in (1, 2, 3) if biased]
    tensor_cores = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[arch]
    for row in rows:
        assert (row["stack"], row["local"], row["spills"]) == (0, 0, 0), row
        assert row["shared"] <= 99 * 1024, row
        assert any(mma.startswith(tensor_cores) for mma in row["mma"]) == (dtype != "float32"), row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "91"], "--arch: invalid choice: 91"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--stage", "0"], "--stage: invalid choice: 0"),
        (["--model", "cvt_99"], "--model: invalid choice: 'cvt_99'"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        aot.main(arguments)
    assert message in capsys.readouterr().err


def test_a_spill_fails_the_command():
    result = compile_ahead(
        "--operator", "conv_projection", "--arch", "90", "--dtype", "float32",
        "--model", "cvt_13 at 224", "--stage", "3",
        prelude="from cvt_kernels import conv_projection_triton as k; "
        "k._MERGE = k.replace(k._MERGE, registers=24)",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert " 0 spills" in result.stdout
