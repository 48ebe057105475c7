"""coverage(): which blocks run fused, why others do not, and which backends serve."""

from threading import Thread

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt_kernels import backends
from cvt_kernels.models.coverage import BlockCoverage, Coverage
from tests.checks import implementation, not_built, record_all_calls, record_calls
from tests.upstream import UPSTREAMS, huggingface, images, microsoft, ours


def accelerated(**config):
    return ck.accelerate(microsoft(**config), freeze=False).eval()


# What it finds ---------------------------------------------------------------------------------------------


def test_reasons_without_running_anything():
    model = microsoft()
    assert {(row.fused, row.reason) for row in ck.coverage(model)} == {
        (False, "accelerate() has not been called")
    }
    called = record_all_calls()
    rows = ck.coverage(ck.accelerate(model, freeze=False))
    assert [row.path for row in rows][:3] == ["stage0.patch_embed", "stage0.blocks.0", "stage1.patch_embed"]
    assert [row.class_name for row in rows][:3] == ["ConvEmbed", "Block", "ConvEmbed"]
    assert all(row.fused and row.backends == {} for row in rows)
    assert rows.called == {}
    assert called == []


def test_which_backends_served_each_block():
    model = accelerated()
    record_calls("attention")
    backends.register("gelu", "cpu", implementation("gelu", ck.reference.gelu))
    for training in (True, False):
        rows = ck.coverage(model.train(training), images())
        built = "reference" if not_built() else "cpu"
        ours = ("layer_norm", "conv_projection", "add_layer_norm")
        expected = {"linear": "reference", "attention": "cpu", "gelu": "cpu"}
        assert rows[0].backends == {"layer_norm": built}
        assert rows[1].backends == dict.fromkeys(ours, built) | expected
        assert rows.called["attention"] == {"cpu": 4}
    with ck.use_backend("reference"):
        rows = ck.coverage(model, images())
    assert set(rows[1].backends) >= {"linear", "gelu"}
    assert {name for row in rows for name in row.backends.values()} == {"reference"}
    with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable):
        ck.coverage(model, images())


@pytest.mark.parametrize("keeps", [(1.0, 0.5, 1.0, 1.0), 1.0], ids=str)
def test_blocks_behind_one_that_drops_tokens_compute_on_rows(keeps):
    config = CvTConfig(embed_dims=(8, 16, 24), depths=(1, 1, 4), num_heads=(1, 1, 2))
    rows = ck.coverage(create_model(config, token_keep=keeps).eval(), images())
    found = {row.path: [name for name in row.backends if "rows" in name] for row in rows}
    expected: dict[str, list[str]] = {path: [] for path in found}
    if keeps != 1.0:
        expected["stage2.blocks.2"] = ["gather_rows", "scatter_rows"]
    assert found == expected


def test_our_own_blocks_are_fused_as_they_are():
    rows = ck.coverage(ck.accelerate(ours(), freeze=False))
    assert all(row.fused for row in rows)
    assert [row.class_name for row in rows][:3] == ["ConvEmbed", "Block", "ConvEmbed"]
    model, called = ours(), record_all_calls()
    model(images())
    assert {operator for row in ck.coverage(model, images()) for operator in row.backends} == set(called)


# The model and the process stay as they are ----------------------------------------------------------------


@pytest.mark.parametrize("make", UPSTREAMS)
@pytest.mark.parametrize("training", [False, True])
def test_it_runs_a_copy(make, training):
    model = ck.accelerate(make(), freeze=None).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    generator, own_call = torch.get_rng_state(), nn.Module.__call__
    ck.coverage(model, {"pixel_values": images()} if make is huggingface else (images(),))
    assert nn.Module.__call__ is own_call
    assert torch.equal(torch.get_rng_state(), generator)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_looks_into_wrappers():
    model = accelerated()
    expected = [row.backends for row in ck.coverage(model, images())]
    for wrapper in (nn.DataParallel(model), torch.compile(model, backend="eager"), nn.Sequential(model)):
        rows = ck.coverage(wrapper, images())
        assert [row.backends for row in rows] == expected
        assert rows[1].path.endswith(".stage0.blocks.0")


def test_two_threads_count_the_calls_of_each():
    model, own_call = accelerated(), nn.Module.__call__
    found = []

    def observe():
        with ck.use_backend("reference"):
            found.append(ck.coverage(model, images()).called)

    observe()
    (expected,) = found
    threads = [Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with torch.no_grad():
            model(images())
    for thread in threads:
        thread.join()
    assert found == [expected] * 5
    assert nn.Module.__call__ is own_call
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    assert compiled(images())  # threads have left torch.compile as it was


def test_everything_is_put_back_after_an_error():
    own_call, known = nn.Module.__call__, backends.implementations
    with pytest.raises(ValueError, match="x: got shape"):
        ck.coverage(accelerated(), torch.ones(3))
    assert nn.Module.__call__ is own_call
    assert backends.implementations is known


@pytest.mark.parametrize("report", [ck.coverage, ck.verify])
@pytest.mark.parametrize(
    ("inputs", "came"),
    [
        ([torch.zeros(1, 3, 64, 64)], "got list, expected a tensor, a tuple"),
        (torch.zeros(1, 3, 64, 64).numpy(), "got ndarray, expected"),
        ({"x": torch.zeros(1, dtype=torch.uint8)}, "got dict without a floating-point tensor, expected"),
        ((), "got tuple without"),
    ],
)
def test_inputs_that_are_no_arguments_of_a_model(report, inputs, came):
    with pytest.raises(TypeError, match=f"^inputs: {came}"):
        report(accelerated(), inputs)


# What it prints --------------------------------------------------------------------------------------------


def test_an_aligned_table():
    model = accelerated()
    model.stage1.blocks[0].attn.conv_proj_k.bn.register_forward_hook(lambda *_: None)
    lines = str(ck.coverage(model, images())).splitlines()
    table = lines[: lines.index("")]
    assert table[0].split()[:4] == ["block", "class", "fused", "operators,"]
    for start in (table[0].index(word) for word in ("class", "fused", "operators")):
        assert all(line[start - 2 : start] == "  " and line[start] != " " for line in table)
    assert len(table) == 1 + 6  # two of equal rows are one
    assert table[2].split()[:5] == ["stage0.blocks.0", "Block", "yes", "layer_norm,", "conv_projection,"]
    (no,) = [line for line in table if " no " in line]
    assert " ".join(no.split()) == "stage1.blocks.0 Block no attn.conv_proj_k.bn has forward hooks"
    assert lines[-1] == "6 of 7 blocks fused"


def test_equal_rows_of_consecutive_blocks_are_one():
    model = accelerated(depths=(1, 1, 6))
    model.stage2.blocks[3].attn.attn_drop.register_forward_hook(lambda *_: None)
    lines = str(ck.coverage(model)).splitlines()
    paths = [line.split()[0] for line in lines[1 : lines.index("")] if line.startswith("stage2")]
    assert paths == ["stage2.patch_embed", "stage2.blocks.0–2", "stage2.blocks.3", "stage2.blocks.4–5"]
    assert lines[0].split() == ["block", "class", "fused", "why", "not"]
    assert lines[-2:] == ["", "10 of 11 blocks fused"]
    assert "served by" not in lines
    with_number = [("fc.0", True), ("fc.1", False), ("0", True), ("1", True), ("a1", True), ("a2", True)]
    rows = [BlockCoverage(path, "Mlp", fused, {}, None) for path, fused in with_number]
    found = [line.split()[0] for line in str(Coverage(rows, {})).splitlines()[1:6]]
    assert found == ["fc.0", "fc.1", "0–1", "a1", "a2"]


def test_the_backends_of_every_operator_once():
    with ck.use_backend("reference"):
        _, served, _ = str(ck.coverage(accelerated(), images())).split("\n\n")
    heading, *lines = served.splitlines()
    assert heading == "served by"
    assert "  attention: reference (4 calls)" in lines
    assert len(lines) == len({line.split(":")[0] for line in lines}) == 6
    rows = Coverage([], {"gelu": {"cpu": 9, "reference": 3}, "attention": {"sdpa": 1}})
    assert "  gelu: cpu (9 calls), reference (3)\n  attention: sdpa (1 call)\n" in str(rows)
