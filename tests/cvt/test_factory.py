"""Models by name, with published or made-up weights."""

import pytest
import torch

from cvt import create_model
from cvt.factory import randomize
from tests.cvt.models import SMALL, equal, small

SIZES = {"embed_dims": (8, 16, 24), "depths": (1, 2, 3), "num_heads": (1, 2, 3)}


@pytest.mark.parametrize(
    ("name", "repository"), [("cvt_13", "microsoft/cvt-13"), ("cvt_w24", "microsoft/cvt-w24-384-22k")]
)
def test_published_weights(hub, name, repository):
    model = small()
    hub.publish(repository, model, labels=[f"thing {i}" for i in range(10)])
    built = create_model(name, pretrained=True, **SIZES)
    assert equal(built.state_dict(), model.state_dict())
    assert (built.num_classes, built.config.activation) == (10, "quick_gelu")
    assert built.labels[3] == "thing 3"
    features = create_model(name, pretrained=True, features_only=True, out_indices=(0,), **SIZES)
    assert torch.equal(features.stage0.patch_embed.proj.weight, model.stage0.patch_embed.proj.weight)


def test_arguments_that_contradict_each_other(tmp_path):
    with pytest.raises(ValueError, match="pretrained: got True beside checkpoint='a/b'"):
        create_model("cvt_13", pretrained=True, checkpoint="a/b")
    for model in (SMALL, None):
        with pytest.raises(ValueError, match=r"pretrained: got True for .*, which is not one of"):
            create_model(model, pretrained=True)
    with pytest.raises(ValueError, match="model: got 'cvt_14', expected one of cvt_13, "):
        create_model("cvt_14", pretrained=True)
    with pytest.raises(TypeError, match="model: got None and no checkpoint"):
        create_model()
    with pytest.raises(TypeError, match="depth: is not a field"):
        create_model("cvt_13", checkpoint=tmp_path / "none.pth", depth=3)


def test_a_name_takes_the_choices_that_were_written_beside_the_weights(tmp_path):
    model = create_model("cvt_13", pool="avg", scale="head_dim", activation="gelu", num_classes=3)
    model.save_pretrained(tmp_path)
    assert create_model("cvt_13", checkpoint=tmp_path).config == model.config


def test_randomize_is_reproducible_and_leaves_no_tensor_constant():
    a, b = (create_model(SMALL, num_classes=5).eval() for _ in range(2))
    for model in (a, b):
        randomize(model)
    for tensor in (*a.parameters(), *a.buffers()):
        assert not tensor.is_floating_point() or tensor.unique().numel() > 1
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(a(x), b(x))
    a(x).sum().backward()
    assert (a(x)[0] - a(x)[1]).abs().max() > 0.3  # the logits depend on the image
