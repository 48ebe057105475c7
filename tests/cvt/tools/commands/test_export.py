"""Exported models in torch.export's and ONNX's own runtimes, beside the model itself."""

import copy
import math
import re
import sys

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import create_model
from cvt.card import ModelCard
from cvt.factory import randomize
from cvt.tools.commands import export as export_module
from cvt.tools.commands import main
from cvt.tools.commands.export import export, with_nodes
from cvt_kernels.ops.linear_int8.modules import ConvInt8
from tests.checks import record_all_calls
from tests.upstream import ONE_STAGE, relative

# What torch.export.load of torch 2.11 says of itself.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")


@pytest.fixture
def model():
    model = create_model(ONE_STAGE).eval()
    randomize(model)
    return model


@pytest.mark.slow
def test_onnx(model, tmp_path):
    path = tmp_path / "model.onnx"
    assert export(model, path, "onnx", image_size=32).difference < 1e-5
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]  # weights included
    graph = onnx.load(path).graph
    assert {node.domain for node in graph.node} == {""}  # of ONNX itself
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape) == ("images", ["batch", 3, 32, 32])
    assert (output.name, output.shape) == ("logits", ["batch", 5])
    for batch in (0, 1, 7):
        x = torch.randn(batch, 3, 32, 32)
        (logits,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(x), rtol=1e-4, atol=1e-4)


@pytest.fixture
def trained(model, tmp_path):
    """Writes a checkpoint as ``cvt train`` does; returns its path."""
    card = ModelCard(model.config, list("abcde"), 32)
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, tmp_path / "small.pth")
    return str(tmp_path / "small.pth")


def test_pt2_by_the_command(capsys, model, trained, tmp_path):
    path = tmp_path / "model.bin"
    path.write_text("before")
    called = record_all_calls()
    ck.use_backend("cpu")  # which notes the calls
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    forward = list(called)
    assert "attention" in forward
    assert main(["export", "--checkpoint", trained, "--format", "pt2", "--output", str(path)]) == 0
    assert called == 2 * forward  # the model's own logits, and nothing of the program
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: images (batch, 3, 32, 32) to logits (batch, 5), within ")
    assert out.endswith(" of the largest logit on 5 random images\n")
    assert err == ""
    with path.open("rb") as file:
        program = torch.export.load(file)
    for batch in (0, 1, 7):
        x = torch.randn(batch, 3, 32, 32)
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.fixture
def pretended(monkeypatch):
    """Returns a function that lets a model's export give the model's own logits, or others."""

    def pretend(model, change=lambda logits: logits):
        monkeypatch.setattr(export_module, "_write", lambda model, images, path, *rest: path.touch())
        monkeypatch.setattr(export_module, "_run", lambda path, parts, _: change(model(torch.cat(parts))))

    return pretend


# Quantized models -----------------------------------------------------------------------------------------

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def quantized(config, **settings):
    model = create_model(config).eval()
    randomize(model)
    ck.quantize(model, IMAGES, **settings)
    return model


def assert_near(actual, model, images):
    """Fails if what an export gives is not the model's, but for numbers that round to either side."""
    with torch.no_grad():
        expected = model(images)
    assert (actual - expected).square().sum() < 1e-4 * expected.square().sum()  # 40 dB


@pytest.mark.slow
def test_onnx_of_a_quantized_model(tmp_path):
    model = quantized(ONE_STAGE)
    path = tmp_path / "q.onnx"
    export(model, path, "onnx", image_size=32)
    graph = onnx.load(path).graph
    assert {node.domain for node in graph.node} == {""}
    rounding = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    standing_for = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert (len(rounding), len(standing_for)) == (6, 12)
    kept = {initializer.name: initializer for initializer in graph.initializer}
    weights = [kept[node.input[0]] for node in standing_for if node.input[0] in kept]
    assert [weight.data_type for weight in weights] == 6 * [onnx.TensorProto.INT8]
    assert not any(node.input[1] in kept for node in rounding)  # a scale for each token is computed
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        (logits,) = session.run(None, {"images": IMAGES[:batch].numpy()})
        assert_near(torch.from_numpy(logits), model, IMAGES[:batch])
    assert session.run(None, {"images": IMAGES[:0].numpy()})[0].shape == (0, 5)


ROWS = torch.stack([torch.zeros(8), torch.full((8,), 1e-38), 1e30 * torch.arange(8), torch.arange(8) - 4.2])


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: ck.LinearInt8.from_float(nn.Linear(8, 4)), ROWS),
        (lambda: ConvInt8.from_float(nn.Conv2d(3, 4, 3, stride=2, padding=1)), IMAGES),
    ],
    ids=["rows of extreme size", "convolution"],
)
def test_onnx_of_a_layer(tmp_path, build, x):
    layer, path = build(), tmp_path / "a.onnx"
    with export_module._quiet(), torch.no_grad():
        program = torch.export.export(with_nodes(nn.Sequential(layer)), (x,))
        torch.onnx.export(program, f=path, dynamo=True, verbose=False, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), layer(x).detach(), rtol=1e-5, atol=1e-5)


def test_float8_is_not_for_onnx(tmp_path):
    model = quantized(ONE_STAGE, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"its layer stage0.* is of float8_e4m3fn, expected int8 for ONNX"):
        export(model, tmp_path / "q.onnx", "onnx", image_size=32)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pt2_of_a_quantized_model(tmp_path):
    model = quantized(ONE_STAGE)
    path = tmp_path / "q.pt2"
    export(model, path, "pt2", image_size=32)
    program = torch.export.load(path)
    assert sum(tensor.dtype == torch.int8 for tensor in program.state_dict.values()) == 6
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert {str(node.target).partition(".")[0] for node in calls} == {"aten", "<built-in function getitem>"}
    assert_near(program.module()(IMAGES), model, IMAGES)


def test_the_command_says_how_far_a_quantized_model_may_be_off(tmp_path, capsys, pretended):
    """Five images may differ in the last bit only, where others have a number between two integers."""
    model = create_model(checkpoint="digits").eval()
    ck.quantize(model)
    model.save_pretrained(tmp_path / "q")
    pretended(model)
    files = ["--checkpoint", str(tmp_path / "q"), "--output", str(tmp_path / "q.pt2")]
    assert main(["export", *files, "--format", "pt2"]) == 0
    found = re.search(
        r"within 0.0e\+00 of the largest logit on 5 random images\n"
        r"on others possibly about (\S+) off, as the model is by its 8-bit numbers\n$",
        capsys.readouterr().out,
    )
    images = torch.randn(64, 3, 16, 16)
    with torch.no_grad():
        rounding = relative(model(images).double(), copy.deepcopy(model).double()(images.double()))
    assert rounding / 4 < float(found[1]) < rounding * 4


@pytest.mark.parametrize(
    ("build", "change", "said"),
    [
        (create_model, lambda logits: logits + 1e-2, "e-0.* of the largest logit, expected at most 1e-04"),
        (create_model, lambda logits: logits + math.nan, "nan of the largest logit, expected at most 1e-04"),
        (quantized, lambda logits: logits * 1.1, "e-0.* of the logits, expected at most"),
        (quantized, lambda logits: logits * math.nan, "nan of the logits, expected at most"),
    ],
)
def test_what_differs_is_not_kept(build, change, said, tmp_path, pretended):
    model = build(ONE_STAGE).eval()
    pretended(model, change)
    with pytest.raises(ValueError, match=f"its export differs by .*{said}"):
        export(model, tmp_path / "model.pt2", "pt2", image_size=32)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_one_line(model, tmp_path, capfd):
    class Decision(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model.head = Decision()
    with pytest.raises(ValueError, match=r"model: cannot be exported: .*data-dependent") as caught:
        export(model, tmp_path / "model.onnx", "onnx", image_size=32)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_bad_input(model, tmp_path, monkeypatch):
    path = tmp_path / "model"

    def fails(error, match, path=path, kind="pt2", model=model, image_size=32):
        with pytest.raises(error, match=match):
            export(model, path, kind, image_size=image_size)
        assert not list(tmp_path.iterdir())

    fails(ValueError, "images: 2×2 pixels are too few", image_size=2)
    fails(OSError, "none: cannot be written to: No such file", tmp_path / "none" / "model")
    fails(IsADirectoryError, "is a directory, expected a file", tmp_path)
    for module in ("onnx", "onnxscript", "onnxruntime"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            fails(ModuleNotFoundError, rf"{module} is not installed; .*'\.\[export\]'", kind="onnx")
