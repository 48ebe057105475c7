"""Launch configurations: tables, formulas, overrides."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cvt_kernels import launch
from cvt_kernels.launch import formulas, records, tables
from cvt_kernels.launch.launching import Chip

H200 = Chip(90, 132, "NVIDIA H200")
#: The configurations of each kernel and size that were within 16 % of the best of all that were timed on an
#: H200 in bfloat16: microseconds, then the fields of the record.
FILE = Path(__file__).parent / "h200.json"
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))


def name_of(measured):
    return f"{measured['kernel']} {measured['sizes']} {measured['rows']}"


def slowdown(measured, config):
    """Returns the time of a configuration over the best one's."""
    best = {tuple(fields): microseconds for microseconds, *fields in measured["best"]}
    fields = tuple(map(int, dataclasses.astuple(config)))
    assert fields in best, (
        f"{name_of(measured)}: {config} is none of the fast configurations in {FILE.name}. Time it on an "
        f"H200 (python -m benchmarks.sweep), and add [microseconds, {', '.join(map(str, fields))}] there"
    )
    return best[fields] / min(best.values())


def need_of(measured, chip=H200):
    return formulas.Need(measured["kernel"], "half", tuple(measured["sizes"]), measured["rows"], chip)


@pytest.mark.parametrize("measured", MEASURED, ids=name_of)
def test_the_formula_is_within_15_percent_of_the_best(measured):
    found = launch.kernels()[measured["kernel"]].formula(need_of(measured))
    assert slowdown(measured, found) <= 1.15


@pytest.mark.parametrize("measured", MEASURED, ids=name_of)
def test_the_table_is_within_8_percent_of_the_best(measured):
    need = need_of(measured)
    assert slowdown(measured, launch.shipped(need)) <= 1.08
    found = launch.configuration(need.kernel, torch.bfloat16, need.sizes, need.rows, H200)
    assert found == launch.shipped(need)


def find(rows, chip=H200, kernel="linear_gelu", dtype=torch.bfloat16, sizes=(384, 1536)):
    launch._configuration.cache_clear()
    return launch.configuration(kernel, dtype, sizes, rows, chip)


def test_a_line_configures_another_gpu(monkeypatch):
    config = records.Product(block_m=32, width=32, block_k=32, num_stages=5)
    line = tables.Entry("linear_gelu", "half", (384, 1536), 500, config)
    gpu = Chip(110, 7, "Made Up X1")
    assert find(500, gpu) != config
    monkeypatch.setitem(tables.TABLES, "Made Up X1", (line,))
    assert find(70, gpu) == find(500, gpu) == find(500, gpu, dtype=torch.float16) == config
    for other in (
        find(500, gpu, dtype=torch.float32),
        find(500, gpu, sizes=(384, 1152)),
        find(500, gpu, "linear_add"),
        find(500),
    ):
        assert other != config


def test_the_nearest_number_of_rows_serves():
    calls = "linear_add", "half", (1536, 384)
    entries = {each.rows: each.config for each in tables.SM_90 if each[:3] == calls}
    assert list(entries) == [197, 1576, 6304, 50432]
    for rows, nearest in ((25, 197), (500, 197), (600, 1576), (3000, 1576), (3300, 6304), (4 * 10**5, 50432)):
        assert find(rows, kernel="linear_add", sizes=(1536, 384)) == entries[nearest]
    assert find(24, kernel="linear_add", sizes=(1536, 384)) not in entries.values()  # too far from all


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formulas_have_a_configuration_for_every_gpu(capability, dtype):
    """Tiles are as many as fill the chip, if rows suffice; a pipeline fits into shared memory."""
    shared = (100 if capability in (86, 89, 120) else 164 if capability < 90 else 228) * 1024
    for kernel in ("linear_gelu", "linear_add", "linear_add_layer_norm"):
        for inputs, outputs in ((64, 64), (320, 1280), (2048, 512), (64, 448), (27, 40)):
            for rows in (1, 49, 197, 784, 20000):
                if kernel == "linear_add_layer_norm" and outputs > 512:
                    continue
                config = find(rows, Chip(capability, 132), kernel, dtype, (inputs, outputs))
                stage = (config.block_m + config.width * config.parts) * config.block_k * dtype.itemsize
                assert config.num_stages * stage <= shared
                assert config.parts == 1 or config.parts * config.width >= outputs
                if rows >= 20000:
                    tiles = -(-rows // config.block_m) * -(-outputs // (config.width * config.parts))
                    assert tiles >= 132 or config.block_m <= 128


def test_a_configuration_is_overridden_for_a_while():
    config = records.Product(block_m=16, width=32, block_k=16, num_stages=2)
    shipped = find(197)
    with launch.overridden("linear_gelu", config):
        assert find(197) == find(10**5, Chip(80, 108)) == config
        with launch.overridden("linear_gelu", dataclasses.replace(config, num_stages=3)):
            assert find(197).num_stages == 3
        assert find(197) == config
        assert find(197, kernel="linear_add", sizes=(1536, 384)) != config
    assert find(197) == shipped
    with pytest.raises(
        ValueError, match="kernel: got 'mul', expected one of attention_bwd, attention_bwd_dkdv"
    ):
        launch.overridden("mul", config).__enter__()
    with pytest.raises(TypeError, match="config: got Product, expected ConvLinear, as conv_linear takes it"):
        launch.overridden("conv_linear", config).__enter__()


def test_no_two_entries_are_for_the_same_calls():
    for entries in tables.TABLES.values():
        assert len({each[:4] for each in entries}) == len(entries)
        for each in entries:
            assert isinstance(each.config, launch.kernels()[each.kernel].record)
