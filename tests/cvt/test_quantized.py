"""Layers of 8-bit numbers in files and in models that are built for them."""

import math

import pytest
import torch

import cvt_kernels as ck
from cvt import CheckpointError, CvT, create_model, load_checkpoint, read_checkpoint, save_huggingface
from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt.quantized import compact, why_damaged
from cvt_kernels.ops.linear_int8.modules import ConvInt8
from tests.cvt.models import equal, quantized, small

FC1, PROJ_K = "stage2.blocks.1.mlp.fc1", "stage1.blocks.0.attn.proj_k"
EMBEDDING = "stage1.patch_embed.proj"


@pytest.fixture
def model():
    return quantized(small(), embeddings=True)


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64)


def saved(model, path, **changes):
    """Writes a model as ``cvt quantize`` does, with some tensors changed, or left out if None."""
    tensors = {name: t for name, t in (model.state_dict() | changes).items() if t is not None}
    card = ModelCard(model.config, [f"class {i}" for i in range(10)], 64, 0.9)
    save_safetensors(Checkpoint("a model", compact(tensors), card=card), path)
    return path


def test_a_file_rebuilds_the_model(model, images, tmp_path):
    model.load_state_dict(compact(model.state_dict()))  # rounded as its file will be
    path = saved(model, tmp_path / "q.safetensors")
    back = create_model(checkpoint=path).eval()
    assert equal(back.state_dict(), model.state_dict())
    assert {type(back.get_submodule(name)) for name in (FC1, PROJ_K)} == {ck.LinearInt8}
    assert type(back.get_submodule(EMBEDDING)) is ConvInt8
    assert type(back.head) is torch.nn.Linear
    assert back.head.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(back(images), model(images))
    assert (back.labels[9], back.preprocessing) == ("class 9", (64, 0.9, ()))
    checkpoint = read_checkpoint(path)
    layers = [name.removesuffix(".qweight") for name in model.state_dict() if name.endswith(".qweight")]
    assert sorted(checkpoint.quantized) == sorted(layers)
    assert len(layers) == 6 * 6 + 2
    assert checkpoint.tensors["head.weight"].dtype == torch.float16
    assert checkpoint.tensors["norm.weight"].dtype == torch.float32
    again = create_model(checkpoint=path)  # a model that is quantized likewise
    assert load_checkpoint(again, path) == (False, ())
    assert equal(CvT.from_pretrained(path).state_dict(), model.state_dict())
    # Parts of it, and another head.
    features = create_model(checkpoint=path, features_only=True, out_indices=(1,)).eval()
    assert type(features.get_submodule(PROJ_K)) is ck.LinearInt8
    with torch.no_grad():
        assert features(images)[0].shape == (2, 16, 8, 8)
    with pytest.warns(UserWarning, match="a head of 10 classes and the model one of 3: the head was not"):
        other = create_model(checkpoint=path, num_classes=3)
    assert torch.equal(other.get_submodule(FC1).weight, model.get_submodule(FC1).weight)
    assert type(create_model(checkpoint=path, num_classes=0).head) is torch.nn.Identity


def test_a_directory_rebuilds_exactly_the_model(model, images, tmp_path):
    model.save_pretrained(tmp_path)
    back = CvT.from_pretrained(tmp_path)
    assert equal(back.state_dict(), model.state_dict())
    with torch.no_grad():
        assert torch.equal(back(images), model(images))
    assert '"model_type"' not in (tmp_path / "config.json").read_text()  # transformers leaves it alone
    with pytest.raises(ValueError, match="model: Hugging Face's CvT has no linear layers of 8-bit numbers"):
        save_huggingface(model, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_models_that_are_quantized_otherwise(model, tmp_path):
    path = saved(model, tmp_path / "q.safetensors")
    plain = saved(small(), tmp_path / "f.safetensors")
    for target, source, message in (
        (small(), path, r"q.safetensors: is quantized \(stage0.*\), the model is not; build it by "),
        (model, plain, r"f.safetensors: is not quantized \(stage0.*\)"),
        (quantized(small(), embeddings=True, dtype=torch.float8_e4m3fn), path, "of another kind"),
    ):
        before = {name: t.clone() for name, t in target.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(target, source)
        assert equal(target.state_dict(), before)


ONES, BYTES = torch.ones(96), torch.ones(96, 24, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, f"is of int8, but there is no {FC1}.weight_scale"),
        ({"weight_scale": ONES[1:]}, r"weight_scale: got \(95,\) of float32, expected \(96,\) of float32"),
        ({"weight_scale": ONES.double()}, r"weight_scale: got \(96,\) of float64"),
        ({"weight_scale": ONES * math.inf}, "weight_scale: has other scales"),
        ({"weight_scale": ONES * math.nan}, "weight_scale: has other scales"),
        ({"weight_scale": -ONES}, "weight_scale: has other scales, expected finite ones of at least 0"),
        ({"input_scale": torch.tensor(1.0)}, r"1 unexpected \(first: .*input_scale\)"),
        ({"qweight": BYTES * -128}, "has a number that is not from -127 to 127"),
        ({"weight": torch.ones(96, 24), "qweight": None}, r"1 unexpected \(first: .*weight_scale\)"),
        ({"qweight": torch.ones(96, 24)}, "qweight: got shape .* of float16, .* of int8 or float8_e4m3fn"),
        ({"weight": BYTES, "qweight": None, "weight_scale": None}, r"1 of another kind .*torch.int8"),
        ({"qweight": BYTES[:, 0]}, r"got shape \(96,\) of int8, torch.strided, expected \(outputs"),
        ({"qweight": BYTES[:, 1:]}, "1 of another shape"),
        ({"qweight": (BYTES * math.nan).to(torch.float8_e4m3fn)}, "a number that is not from -448 to 448"),
    ],
)
def test_damaged_layers(tmp_path, changes, message):
    changes = {f"{FC1}.{name}": tensor for name, tensor in changes.items()}
    path = saved(quantized(small()), tmp_path / "q.safetensors", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        create_model(checkpoint=path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "layer", ["head", "stage0.patch_embed.proj", "stage0.blocks.0.attn.conv_proj_q.conv"]
)
def test_8_bit_numbers_where_no_linear_layer_is(tmp_path, layer):
    weight = torch.ones_like(small().get_submodule(layer).weight, dtype=torch.int8)
    extra = {f"{layer}.qweight": weight, f"{layer}.weight_scale": torch.ones(len(weight))}
    path = saved(small(), tmp_path / "q.safetensors", **extra)
    with pytest.raises(CheckpointError, match=f"{layer}.qweight: is of int8, where no layer has such"):
        create_model(checkpoint=path)


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda t: t.to("meta")])
def test_tensors_without_plain_memory(change):
    weight, scale = torch.ones(3, 2, dtype=torch.int8), torch.ones(3)
    assert why_damaged({"a.qweight": weight, "a.weight_scale": scale}) is None
    assert "a.qweight: got shape" in why_damaged({"a.qweight": change(weight), "a.weight_scale": scale})
    assert "a.weight_scale: got (3,)" in why_damaged({"a.qweight": weight, "a.weight_scale": change(scale)})


def test_what_stays_in_floating_point_is_rounded_where_that_is_accurate():
    tensors = {
        "matrix": torch.randn(5, 7),
        "vector": torch.randn(5),
        "huge": torch.full((2, 2), 1e5),
        "tiny": torch.full((2, 2), 1e-8),
        "nan": torch.full((2, 2), math.nan),
        "zeros": torch.zeros(2, 2),
        "empty": torch.zeros(2, 0),
        "bits": torch.ones(2, 2, dtype=torch.int8),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
    }
    kept = compact(tensors)
    changed = [name for name in tensors if kept[name] is not tensors[name]]
    assert changed == ["matrix", "zeros"]
    assert all(kept[name].dtype == torch.float16 for name in changed)
    torch.testing.assert_close(kept["matrix"].float(), tensors["matrix"], rtol=2**-11, atol=1e-7)
