"""The layers that the ``kernels`` package lends to models of transformers, tested with both packages."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import cvt_kernels as ck
from cvt_kernels.kernelized import layers, registration
from cvt_kernels.models.watching import LENT
from tests import upstream
from tests.checks import assert_accurate, python_blocks, run_blocks, section_of

MODELS = ("huggingface", "segformer", "pvt", "pvt_v2", "glpn")
FOLDER = Path(registration.__file__).parent


def test_without_kernels_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match=r"register_layers: .*kernels.*; expected transformers>=5\.20 and"):
        ck.register_layers()


def test_layers_have_upstreams_arguments():
    names = [cls.__name__ for cls in layers.upstream_classes()]
    assert {"CvtStage", "CvtLayer", "SegformerLayer", "PvtLayer", "PvtV2BlockLayer", "GLPNLayer"} <= {*names}
    for cls in layers.upstream_classes():
        layer = getattr(layers, cls.__name__)
        assert layer.__bases__ == (nn.Module,)
        assert layer is getattr(layers, cls.__name__)
    with pytest.raises(AttributeError, match="no attribute 'ViTLayer'"):
        _ = layers.ViTLayer


@pytest.fixture
def kernels(monkeypatch):
    """The package, with our layers registered for the test only."""
    package = pytest.importorskip("kernels", reason="the package kernels is not installed")
    if not transformers.utils.is_kernels_available():
        pytest.skip("transformers asks for another version of kernels")
    from kernels.layer.globals import _KERNEL_MAPPING

    before = _KERNEL_MAPPING.set(copy.deepcopy(_KERNEL_MAPPING.get()))
    ck.register_layers()
    yield package
    _KERNEL_MAPPING.reset(before)
    for cls in layers.upstream_classes():
        for name in ("kernel_layer_name", "kernel_condition"):
            vars(cls).get(name) and delattr(cls, name)


def lent(model):
    return [type(module).__name__ for module in model.modules() if hasattr(vars(module).get("forward"), LENT)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loaded_with_use_kernels_computes_what_accelerate_does(kernels, name, tmp_path):
    own = getattr(upstream, name)().eval()
    own.save_pretrained(tmp_path)
    ours = type(own).from_pretrained(tmp_path, use_kernels=True)
    side = 70 if name == "pvt" else 64  # transformers' PVT takes its configuration's size alone
    x = upstream.images(height=side, width=side)
    with torch.no_grad():
        fused = ck.accelerate(copy.deepcopy(own), freeze=None)
        actual = upstream.logits(ours(x))
        torch.testing.assert_close(actual, upstream.logits(fused(x)), rtol=1e-5, atol=1e-6)
        right = upstream.logits(copy.deepcopy(own).double()(x.double()))
        assert_accurate(actual, upstream.logits(own(x)), right)
    assert all(row.fused for row in ck.coverage(ours))
    assert lent(ours)


@pytest.mark.parametrize("name", ["huggingface", "segformer"])
def test_gradients_and_modes(kernels, name):
    own = getattr(upstream, name)()
    ours = copy.deepcopy(own)
    ours.use_kernels = True
    x = upstream.images()
    upstream.assert_same_step(own.train(), ours.train(), x, 1e-4)
    with torch.no_grad():
        ours.eval()
        expected = upstream.logits(ours(x))
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        torch.testing.assert_close(upstream.logits(compiled(x)), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_differs_keeps_its_forward(kernels):
    model = upstream.segformer().eval()
    model.segformer.stages[0].blocks[0].mlp.activation_fn = nn.SiLU()
    before = lent(copy.deepcopy(model))
    model.use_kernels = True
    assert before == []
    assert lent(model).count("SegformerLayer") == 2  # of three


def test_the_folder_is_a_local_kernel(kernels, monkeypatch):
    """KernelConfig refuses CPUs, so the model's parameters pass for a GPU's."""
    loaded = kernels.get_local_kernel(FOLDER).layers
    assert loaded.CvtStage is layers.CvtStage
    model = upstream.segformer().eval()
    config = transformers.KernelConfig({"SegformerLayer": f"{FOLDER}:SegformerLayer"}, use_local_kernel=True)
    for module in ("transformers.utils.kernel_config", "transformers.integrations.hub_kernels"):
        monkeypatch.setattr(f"{module}.get_device_type", lambda device: "cuda")
    monkeypatch.setattr("kernels.layer.repos._find_capability", lambda: 90)
    model.set_use_kernels(True, config)
    assert {*lent(model)} == {"SegformerLayer"}


def test_the_page_runs_as_it_stands(kernels):
    names = run_blocks(python_blocks(section_of("accelerated.md", "## Layers by use_kernels")))
    assert lent(names["model"])
