"""Models where torch.jit.trace, ONNX exporters, torch.export and torch.fx record them."""

import copy
import inspect
import io

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import backends
from tests.checks import not_built
from tests.processes import run_python
from tests.upstream import (
    Logits,
    glpn,
    huggingface,
    images,
    microsoft,
    one_block,
    ours,
    pvt,
    pvt_v2,
    relative,
    segformer,
)

pytestmark = [
    # What PyTorch says of its own exporters.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*legacy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

FOUR_STAGES = {
    "num_encoder_blocks": 4, "depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16],
    "num_attention_heads": [1, 1, 2, 2], "patch_sizes": [7, 3, 3, 3], "strides": [4, 2, 2, 2],
    "mlp_ratios": [2] * 4, "sr_ratios": [4, 2, 1, 1],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_request():
    ck.use_backend("auto")


def alone(model):
    """Returns a model that returns logits alone."""
    return Logits(model) if hasattr(model, "cvt") else model


def models(make, own):
    """Yields a model as it is accelerated, live and frozen, each with what it was."""
    own = own.eval()
    for freeze in (False, True):
        fused = copy.deepcopy(own)
        if freeze or make is not ours:
            ck.accelerate(fused, freeze=freeze)
        backends.dispatch_cache.clear()
        backends._fallbacks.clear()
        yield alone(fused), alone(own)


every_model = pytest.mark.parametrize("make", [huggingface, microsoft, ours])


def assert_records_own(kinds):
    assert not [kind for kind in kinds if "cvt_kernels" in kind]
    assert (backends.dispatch_cache, ck.fallbacks()) == ({}, {})


@torch.no_grad()
@every_model
def test_traces_are_those_of_the_model(make):
    for model, own in models(make, make()):
        traced = torch.jit.trace(model, images(), check_trace=False)
        assert_records_own(node.kind() for node in traced.inlined_graph.nodes())
        with ck.use_backend("sdpa", "reference"):
            for x in (images(), images(5)):
                assert relative(traced(x), own(x)) < 1e-5


@torch.no_grad()
@every_model
@pytest.mark.slow
def test_onnx_by_the_old_exporter(make):
    for model, own in models(make, make()):
        file = io.BytesIO()
        torch.onnx.export(
            model, (images(),), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}
        )
        graph = onnx.load_from_string(file.getvalue()).graph
        assert_records_own(node.domain for node in graph.node)
        session = onnxruntime.InferenceSession(file.getvalue())
        # Microsoft's class token has the batch that was traced there, accelerated or not.
        for x in (images(), images(2 if make is microsoft else 5)):
            (out,) = session.run(None, {"x": x.numpy()})
            with ck.use_backend("sdpa", "reference"):
                assert relative(torch.from_numpy(out), own(x)) < 1e-5


class OfMaps(nn.Module):
    """A head of four maps."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, a, b, c, d):
        return self.head((a, b, c, d))


class Leaves(torch.fx.Tracer):
    """A tracer that calls layers, which look at the sizes of their inputs."""

    def is_leaf_module(self, module, name):
        return type(module).__name__.endswith(("Layer", "Embeddings")) or super().is_leaf_module(module, name)


@torch.no_grad()
@pytest.mark.parametrize("freeze", [None, True, False])
@pytest.mark.parametrize("make", [huggingface, microsoft, pvt, pvt_v2, glpn])
def test_symbolic_traces_of_whole_models(make, freeze):
    """By their own forwards, whose other arguments are constants and ``**kwargs`` are not used."""
    own = make().eval()
    fused = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    names = list(inspect.signature(own.forward).parameters)[1:]
    constants = dict.fromkeys(name for name in names if name != "kwargs")
    graph, expected = (Leaves().trace(model, constants) for model in (fused, own))
    assert [(node.op, str(node.target)) for node in graph.nodes] == [
        (node.op, str(node.target)) for node in expected.nodes
    ]


@torch.no_grad()
@pytest.mark.parametrize("freeze", [None, True, False])
def test_symbolic_traces_of_a_decode_head(freeze):
    own = segformer(**FOUR_STAGES)
    fused = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    maps = own(images(), output_hidden_states=True).hidden_states
    traced = torch.fx.symbolic_trace(OfMaps(fused.decode_head))
    assert len(traced.graph.nodes) == len(torch.fx.symbolic_trace(OfMaps(own.decode_head)).graph.nodes)
    assert relative(traced(*maps), own.decode_head(maps)) < 1e-5


@torch.no_grad()
def test_files_need_nothing_of_this_package(tmp_path):
    model, own = next(models(ours, one_block(ours)))
    x = images()
    torch.jit.trace(model, x, check_trace=False).save(tmp_path / "model.ts")
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save(x, tmp_path / "x.pt")
    code = f"""
import sys, warnings
sys.modules |= dict.fromkeys(("cvt", "cvt_kernels"))
warnings.simplefilter("ignore", DeprecationWarning)
import torch
folder = {str(tmp_path)!r}
x = torch.load(folder + "/x.pt")
outs = torch.jit.load(folder + "/model.ts")(x), torch.export.load(folder + "/model.pt2").module()(x)
torch.save([out.detach() for out in outs], folder + "/outs.pt")
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    for out in torch.load(tmp_path / "outs.pt"):
        assert relative(out, own(x)) < 1e-5


@torch.no_grad()
@pytest.mark.skipif(not_built(), reason="there is no C++ compiler")
def test_requested_kernels():
    """They become operators of an exported program, and cannot be part of a trace."""
    model, own = next(models(huggingface, one_block(huggingface)))
    with ck.use_backend("cpu", "sdpa", "reference"):
        program = torch.export.export(model, (images(),))
    assert [node for node in program.graph.nodes if str(node.target).startswith("cvt_kernels.")]
    assert relative(program.module()(images()), own(images())) < 1e-5
    with ck.use_backend("cpu"):
        model = ours().eval()
        with pytest.raises(ck.BackendUnavailable, match="records PyTorch's own operators only"):
            torch.jit.trace(model, images())
