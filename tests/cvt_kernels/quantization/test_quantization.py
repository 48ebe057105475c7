"""quantize, calibration, the report, and what puts layers back."""

import copy
import io
import math
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

import cvt_kernels as ck
from cvt_kernels import quantization
from cvt_kernels.ops.linear_int8.modules import ConvInt8, LinearInt8, QuantizedLayer
from tests.checks import Terminal
from tests.upstream import PYRAMIDS, huggingface, images, logits, microsoft, ours, segformer

MAKERS = [ours, huggingface, microsoft, *PYRAMIDS]
FC2 = "stage2.blocks.1.mlp.fc2"

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(scope="module")
def original():
    return ours().eval()


@pytest.fixture
def model(original):
    return copy.deepcopy(original)


@torch.no_grad()
def run(model, x=None):
    return logits(model(images(2, *size_of(model)) if x is None else x))


def size_of(model):
    """Returns the height and width of images; PVT takes one size only, and GLPN halves sizes five times."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    return {"pvt": (70, 70), "glpn": (32, 64)}.get(kind, (32, 48))


def decibels(exact, actual):
    """Returns the ratio of a signal to an error of it."""
    exact, actual = exact.double(), actual.double()
    return (10 * (exact.square().sum() / (actual - exact).square().sum()).log10()).item()


def linears(model):
    """Returns the paths of the linear layers of a model's blocks."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | LinearInt8)
        and path not in ("head", "classifier")
        and not path.startswith("decode_head")
    ]


# What is quantized ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_every_linear_layer_of_the_blocks_becomes_one_of_8_bits(make):
    model = make().eval()
    paths, expected = linears(model), run(model)
    before = dict(model.named_modules())
    report = ck.quantize(model)
    assert [row.path for row in report] == paths
    assert {row[1:] for row in report} == {("int8", None, None)}
    after = dict(model.named_modules())
    assert list(after) == list(before)
    assert [path for path, m in after.items() if m is not before[path]] == paths
    assert all(type(after[path]) is LinearInt8 for path in paths)
    assert decibels(expected, run(model)) > 25
    assert getattr(model, "dtype", torch.float32) == torch.float32  # transformers': the parameters' dtype
    assert torch.equal(run(ck.restore(model)), expected)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("make", MAKERS)
def test_an_accelerated_model_and_its_calibration(make):
    model = ck.accelerate(make().eval())
    expected = run(model)
    x = images(2, *size_of(model))
    report = ck.quantize(model, x)
    assert {row.weight for row in report} == {"int8"}
    assert decibels(expected, run(model)) > 25
    assert all(row.fused for row in ck.coverage(model))
    plain = ck.quantize(own := make().eval(), x)
    for row, other in zip(report, plain, strict=True):
        assert row.sqnr == pytest.approx(other.sqnr, abs=2)
    assert decibels(run(own), run(model)) > 25


def test_the_state_has_integers_scales_and_the_bias(model):
    ck.quantize(model, keep_float=["stage0.*"])
    state = model.state_dict()
    assert {key for key in state if key.startswith(FC2)} == {
        f"{FC2}.{name}" for name in ("qweight", "weight_scale", "bias")
    }
    assert (state[f"{FC2}.qweight"].dtype, state[f"{FC2}.qweight"].shape) == (torch.int8, (48, 192))
    assert state["stage0.blocks.0.mlp.fc2.weight"].dtype == torch.float32
    assert not any("_float" in key for key in state)
    same = ours().eval()
    torch.nn.init.ones_(same.get_submodule(FC2).weight)
    ck.quantize(same, keep_float=["stage0.*"])
    same.load_state_dict(state)
    assert torch.equal(run(same), run(model))
    ck.restore(same)  # what it was made of had other weights
    assert torch.equal(run(same), run(model))


def test_embeddings_but_the_first_are_products_too(model):
    expected = run(model)
    report = ck.quantize(model, images(2, 32, 48), embeddings=True)
    found = {row.path for row in report} - set(linears(model))
    assert found == {"stage1.patch_embed.proj", "stage2.patch_embed.proj"}
    assert all(type(model.get_submodule(path)) is ConvInt8 for path in found)
    assert type(model.stage0.patch_embed.proj) is nn.Conv2d
    assert decibels(expected, run(model)) > 25
    assert torch.equal(run(ck.restore(model)), expected)


def test_wrappers_and_shared_layers_are_looked_into(model):
    model.stage2.blocks[1].mlp = model.stage2.blocks[0].mlp
    expected = run(model)
    wrapped = nn.Sequential(model).eval()
    report = ck.quantize(wrapped)
    assert model.stage2.blocks[1].mlp.fc1 is model.stage2.blocks[0].mlp.fc1
    assert report[0].path == "0.stage0.blocks.0.attn.proj_q"
    assert decibels(expected, run(wrapped)) > 25
    ck.restore(wrapped)
    assert not any(isinstance(m, QuantizedLayer) for m in model.modules())
    model.stage2.blocks[1].mlp.fc1 = shared = model.stage2.blocks[0].mlp.fc1
    ck.quantize(model)
    assert type(shared) is nn.Linear
    ck.restore(model)
    assert model.stage2.blocks[1].mlp.fc1 is model.stage2.blocks[0].mlp.fc1 is shared


def test_other_layers_stay_and_are_listed_with_the_reason(model):
    block = model.stage2.blocks[1]
    weight_norm(block.mlp.fc1)
    block.mlp.fc2.register_forward_hook(lambda *_: None)
    block.attn.proj = nn.Sequential(block.attn.proj)
    block.attn.proj_q.__class__ = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    stay = {row.path.rpartition(".")[2]: row for row in ck.quantize(model) if row.weight == "float"}
    assert stay["fc1"].reason == "is a ParametrizedLinear, expected nn.Linear"
    assert stay["fc2"].reason == "has forward hooks"
    assert stay["proj"].reason == "is a Sequential, expected nn.Linear"
    assert stay["proj_q"].reason == (
        "is a peft.tuners.lora.layer.Linear, expected nn.Linear; merge_and_unload() of the model with "
        "adapters puts plain layers back"
    )
    assert len(stay) == 4


def test_a_block_of_another_forward_stays():
    class Mlp(type(ours().stage0.blocks[0].mlp)):
        def forward(self, x):
            return self.fc2(torch.relu(self.fc1(x)))

    model = ours().eval()
    model.stage0.blocks[0].mlp.__class__ = Mlp
    rows = [row for row in ck.quantize(model) if row.weight == "float"]
    layers = ("attn.proj_q", "attn.proj_k", "attn.proj_v", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert [row.path for row in rows] == [f"stage0.blocks.0.{layer}" for layer in layers]
    assert rows[0].reason.startswith("mlp is a test_a_block_of_another_forward_stays")


def test_layers_are_kept_by_name_or_pattern(model):
    report = ck.quantize(model, keep_float=[FC2, "stage1.*.attn.*"])
    kept = [row.path for row in report if row.weight == "float"]
    assert kept == [*(f"stage1.blocks.0.attn.{name}" for name in ("proj_q", "proj_k", "proj_v", "proj")), FC2]
    assert {row.reason for row in report if row.path in kept} == {"is kept by keep_float"}
    assert all(type(model.get_submodule(path)) is nn.Linear for path in kept)


# Errors ---------------------------------------------------------------------------------------------------

#: Wrong settings or models, besides tests/cvt_kernels/test_arguments.py's.
WRONG = {
    "no blocks": (
        {},
        lambda m: nn.Linear(3, 4).eval(),
        "model: got Linear of torch, expected a model with linear",
    ),
    "training": ({}, lambda m: m.train(), "model: is in training mode"),
    "empty": ({"calibration": []}, None, "calibration: is empty"),
    "rank": ({"calibration": torch.ones(3, 32, 32)}, None, r"calibration: got torch.float32 of shape \(3"),
    "bytes": (
        {"calibration": [torch.ones(1, 3, 32, 32).byte()]},
        None,
        "calibration: batch 0: got torch.uint",
    ),
    "labels": ({"calibration": [{"labels": 1}]}, None, "calibration: batch 0: got NoneType"),
    "channels": (
        {"calibration": [images(1, 32, 32), torch.ones(1, 4, 32, 32)]},
        None,
        r"calibration: batch 1 of shape \(1, 4, 32, 32\) does not fit the model: images: got shape",
    ),
    "NaN": (
        {"calibration": torch.full((1, 3, 32, 32), torch.nan)},
        None,
        "calibration: layer stage0.blocks.0.attn.proj_q got or returned NaN",
    ),
    "pattern": ({"keep_float": ["stage9.*"]}, None, r"keep_float: 'stage9.\*' matches none of the 24 layers"),
    "a long name": (
        {"keep_float": "y" * 10**5},
        None,
        r"keep_float: got the string '.{,80}', expected a sequence",
    ),
    "nothing": ({"keep_float": ["*"]}, None, "model: none of its 24 layers can be quantized; the first"),
    "none is good enough": (
        {"calibration": images(1, 32, 32), "min_sqnr": 90},
        None,
        "model: none of its 24 layers can be quantized; .* would be less than min_sqnr, 90",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument_and_leave_the_model(model, case):
    settings, change, message = WRONG[case]
    changed = model if change is None else change(model)
    before = dict(model.named_modules())
    with pytest.raises((TypeError, ValueError), match=f"^{message}") as caught:
        ck.quantize(changed, **settings)
    assert "\n" not in str(caught.value)
    assert dict(model.named_modules()) == before
    assert not any(m._forward_hooks for m in model.modules())
    assert model.training == (case == "training")


def test_a_weight_that_is_not_finite_is_named(model):
    with torch.no_grad():
        model.get_submodule(FC2).weight[0, 0] = math.inf
    with pytest.raises(ValueError, match=f"^model: {FC2}.weight: has NaN or infinities"):
        ck.quantize(model)
    assert type(model.stage0.blocks[0].mlp.fc1) is nn.Linear


def test_a_quantized_model_is_not_quantized_again(model):
    ck.quantize(model, keep_float=["stage0.*"])
    with pytest.raises(ValueError, match=r"^model: is quantized already \(layer stage1.blocks.0.attn.proj_q"):
        ck.quantize(model)


# Calibration ----------------------------------------------------------------------------------------------


def test_sqnr_is_that_of_the_layers_output_for_the_float_models_input(model):
    x, seen = images(2, 32, 48), {}
    layer = model.get_submodule(FC2)
    handle = layer.register_forward_hook(lambda module, args, out: seen.update(x=args[0], y=out))
    run(model, x)
    handle.remove()
    report = ck.quantize(model, x)
    row = next(row for row in report if row.path == FC2)
    with torch.no_grad():
        expected = decibels(seen["y"], model.get_submodule(FC2)(seen["x"]))
    assert row.sqnr == pytest.approx(expected, abs=1e-4)
    assert report.worst() == sorted(report, key=lambda row: row.sqnr)
    text = str(report)
    assert f"{row.path}" in text
    assert f"{row.sqnr:.1f} dB" in text
    assert text.endswith("24 of 24 layers quantized")


FORMS = [
    lambda x: [x[:2], x[2:]],
    lambda x: [{"pixel_values": x[:3], "labels": torch.ones(3)}, {"pixel_values": x[3:]}],
    lambda x: [(x[:2], torch.ones(2)), [x[2:]]],
    lambda x: (part for part in x.split(1)),
    lambda x: x.double(),
]


def test_batches_come_in_every_form(original):
    x = images(4, 32, 32)
    expected, *others = (
        [row.sqnr for row in ck.quantize(copy.deepcopy(original), form(x))] for form in (lambda x: x, *FORMS)
    )
    for found in others:
        assert found == pytest.approx(expected, abs=0.1)


def test_calibration_evaluates_without_gradients_and_puts_modes_back(model):
    model.stage1.train()
    model.training = False
    seen, modes = [], [module.training for module in model.modules()]
    statistics = model.stage1.blocks[0].attn.conv_proj_q.bn.running_mean.clone()
    handle = model.stage1.blocks[0].register_forward_pre_hook(
        lambda module, args: seen.append((module.training, torch.is_grad_enabled()))
    )
    ck.quantize(model, images(1, 32, 32))
    handle.remove()
    assert seen == [(False, False)]
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model.stage1.blocks[0].attn.conv_proj_q.bn.running_mean, statistics)


@pytest.mark.parametrize("make", [ours, segformer])
def test_layers_that_would_lose_too_much_stay(make):
    model, x = make().eval(), images(2, 32, 48)
    exact = run(model)
    report = ck.quantize(copy.deepcopy(model), x)
    least = sorted(row.sqnr for row in report)[len(report) // 2]
    mixed = ck.quantize(model, x, min_sqnr=least)
    stayed = [row.path for row in report if row.sqnr < least]
    assert [row.path for row in mixed if row.weight == "float"] == stayed
    assert all(type(model.get_submodule(path)) is nn.Linear for path in stayed)
    assert f"dB would be less than min_sqnr, {least:g}" in str(mixed)
    assert decibels(exact, run(model)) > 25


def test_layers_without_numbers_and_without_calls(model):
    block = model.stage2.blocks[1]
    with torch.no_grad():
        block.mlp.fc1.weight.zero_()
        block.mlp.fc1.bias.zero_()
    model.forward = model.forward_features
    model.stage1.blocks[0].forward = lambda x, *rest: x
    report = {row.path: row for row in ck.quantize(model, images(1, 32, 32))}
    assert report[FC2].sqnr == math.inf
    uncalled = report["stage1.blocks.0.mlp.fc1"]
    assert uncalled[1:] == ("int8", None, "was not called by the calibration")


def test_progress_is_shown_on_a_terminal(model, monkeypatch):
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        ck.quantize(copy.deepcopy(model), [images(1, 32, 32)], progress=True)
        assert ("errors" in stream.getvalue()) == shown


# Back to floating point -----------------------------------------------------------------------------------


def test_single_layers_are_put_back(model):
    before = model.get_submodule(FC2)
    ck.quantize(model)
    assert quantization.unquantize(model, [FC2]) is model
    assert model.get_submodule(FC2) is before
    fc1 = model.stage2.blocks[1].mlp.fc1
    for path, message in ((FC2, "is a Linear"), ("stage9", "is nothing")):
        with pytest.raises(ValueError, match=f"^paths: '{path}' {message}, expected a quantized layer"):
            quantization.unquantize(model, ["stage2.blocks.1.mlp.fc1", path])
    with pytest.raises(TypeError, match="paths: got the string 'stage0', expected names of layers"):
        quantization.unquantize(model, "stage0")
    assert model.stage2.blocks[1].mlp.fc1 is fc1
    fc1._float = None  # as of a layer that was loaded as it is
    with pytest.raises(ValueError, match="was loaded as it is"):
        quantization.unquantize(model, ["stage2.blocks.1.mlp.fc1"])
    ck.restore(model)
    assert model.stage2.blocks[1].mlp.fc1 is fc1


@pytest.mark.parametrize("bias", [True, False])
def test_restored_layers_are_as_the_model_is_by_then(bias):
    model = ours().eval()
    block = model.stage0.blocks[0]
    if not bias:
        block.attn.proj_q.bias = None
    before, weight = block.attn.proj_q, block.attn.proj_q.weight
    parameters = len(list(model.parameters()))
    ck.quantize(model)
    assert len(list(model.parameters())) == parameters - 24
    model.to(torch.bfloat16)
    assert before.weight.dtype == torch.float32  # it is kept aside
    assert block.attn.proj_q.weight.dtype == torch.int8
    ck.restore(model)
    assert block.attn.proj_q is before
    assert before.weight is weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not before.training
    assert run(model, images(1, 32, 32).bfloat16()).dtype == torch.bfloat16


# Where a model in floating point would read them ----------------------------------------------------------


class OfTheHub(nn.Module, PyTorchModelHubMixin):
    """A model whose ``from_pretrained`` ignores what a file lacks."""

    def __init__(self):
        super().__init__()
        self.inner = ours()


@pytest.mark.parametrize("make", [huggingface, OfTheHub])
def test_saving_for_a_from_pretrained_that_has_no_such_layers_is_refused(make, tmp_path):
    model = make().eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ck.quantize(nn.Sequential(model).eval())
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(
            ValueError, match=r"^save_pretrained: .* 8-bit numbers, .*torch.save.*restore\(model"
        ):
            each.save_pretrained(tmp_path / "model")
        assert not list(tmp_path.iterdir())
        ck.restore(each).save_pretrained(tmp_path / "restored")
        assert "save_pretrained" not in vars(each)
        again = type(model).from_pretrained(tmp_path / "restored").state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
        shutil.rmtree(tmp_path / "restored")


# Where models are used ------------------------------------------------------------------------------------


def test_float8(model):
    expected = run(model)
    report = ck.quantize(model, images(2, 32, 48), dtype=torch.float8_e4m3fn)
    assert model.get_submodule(FC2).weight.dtype == torch.float8_e4m3fn
    assert min(row.sqnr for row in report) > 25
    assert decibels(expected, run(model)) > 20
    assert model.half().get_submodule(FC2).weight.dtype == torch.float8_e4m3fn


def test_copies_and_pickles(model):
    expected = run(model)
    report = ck.quantize(model, images(1, 32, 32))
    quantized = run(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(copied), quantized)
        assert copied.get_submodule(FC2).bias is copied.get_submodule(FC2).float_layer.bias
        assert torch.equal(run(ck.restore(copied)), expected)
    assert torch.equal(run(model), quantized)
    assert pickle.loads(pickle.dumps(report)) == report


def test_distributed(model, tmp_path):
    expected = run(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        wrapped.eval()
        report = ck.quantize(wrapped, images(1, 32, 32))
        assert report[0].path == "module.stage0.blocks.0.attn.proj_q"
        assert decibels(expected, run(wrapped)) > 25
        again = DistributedDataParallel(model)
        assert torch.equal(run(again.eval()), run(model))
    finally:
        dist.destroy_process_group()


def test_compiled_as_one_graph():
    model = ours().eval()
    del model.stage1, model.stage2
    model.config = copy.copy(model.config)
    model._stage_names = ["stage0"]
    model.norm, model.head = nn.Identity(), nn.Identity()
    x = images(1, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = run(compiled, x)
    report = ck.quantize(compiled, x)  # its hooks are seen although the model is compiled
    assert min(row.sqnr for row in report) > 25
    out = run(compiled, x)
    assert decibels(run(model, x), out) > 80
    assert 20 < decibels(expected, out) < 80


def test_gradients_of_inputs_and_biases_pass(model):
    x = images(1, 32, 32).requires_grad_()
    model(x).sin().sum().backward()
    expected = x.grad.clone()
    x.grad = None
    ck.quantize(model)
    with ck.use_backend("reference"):
        out = model(x)
        assert torch.equal(out.detach(), run(model, x))
    out.sin().sum().backward()
    assert decibels(expected, x.grad) > 10
    assert all(p.grad is not None for p in model.parameters())
