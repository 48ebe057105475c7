"""Frozen stages and layers under torch.compile on a CPU, where each is one operator."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from tests.cvt_kernels.models.served import CVTS, frozen, inputs, outermost_of, stages_of
from tests.upstream import ENCODERS, TIMMS, images, logits, ours, pvt_v2, relative, segformer

STAGE, LAYER = "cvt_kernels.frozen_stage.default", "cvt_kernels.frozen_layer.default"


@pytest.fixture(autouse=True)
def _fresh(without_gradients):
    torch.compiler.reset()


class Compiled:
    """A compiled model, with the number of frozen stages and layers in each of its graphs."""

    def __init__(self, model, **settings):
        self.counts = []
        self.model = torch.compile(model, fullgraph=True, backend=self._note, **settings)

    def _note(self, graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.counts.append(targets.count(STAGE) + targets.count(LAYER))
        return graph.forward

    def __call__(self, *args):
        return self.model(*args)


#: The first stage of ours and the first layer of a PVT v2, each with the arguments of a call.
PARTS = {
    "stage": (ours, (images(),)),
    "layer": (pvt_v2, (torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1)), 5, 6)),
}


@pytest.fixture(params=PARTS)
def part(request):
    """Returns a module, its frozen copy and the arguments of a call."""
    make, args = PARTS[request.param]
    own = stages_of(make().eval())[0]
    return own, frozen(own), args


@pytest.mark.parametrize("make", [*CVTS, pvt_v2, segformer, *ENCODERS, *TIMMS])
def test_each_stage_is_one_operator(make, served):
    size = (32, 32) if make in (*ENCODERS, *TIMMS) else ()
    fused, xs = frozen(make()), [inputs(make, batch, *size) for batch in (2, 3)]
    count = len(outermost_of(fused))
    logits(fused(xs[0]))  # transformers records hidden states in the first call, and leaves hooks
    compiled = Compiled(fused, dynamic=True)
    for x in xs:
        tolerance = 1e-5 if make is segformer else 1e-6  # not the same bits in torch 2.11
        assert relative(logits(compiled(x)), logits(fused(x))) < tolerance
    assert (compiled.counts, len(served)) == ([count], 5 * count)


def test_a_graph_serves_tokens_of_several_sizes(served):
    layer = stages_of(frozen(pvt_v2()))[0]
    compiled = Compiled(layer, dynamic=True)
    for height, width in ((5, 6), (8, 4)):
        x = torch.randn(2, height * width, 16)
        assert torch.equal(compiled(x, height, width)[0], layer(x, height, width)[0])
    assert (compiled.counts, len(served)) == ([1], 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, about itself
def test_inductor_with_freezing(served):
    from torch._inductor import config

    fused, x = frozen(ours()).stage0, images()
    with config.patch(freezing=True):
        compiled = torch.compile(fused, fullgraph=True)
        tokens, grid = compiled(x)
        expected = fused(x)
        assert grid == expected[1]
        assert torch.equal(tokens, expected[0])
        fused.patch_embed.norm.bias.add_(1)
        assert torch.equal(compiled(x)[0], fused(x)[0])
    assert len(served) == 4


def test_the_operators_are_as_pytorch_expects(part):
    _, fused, (x, *grid) = part
    operator = torch.ops.cvt_kernels.frozen_layer if grid else torch.ops.cvt_kernels.frozen_stage
    torch.library.opcheck(operator.default, (x, fused._cvt_kernels_number, *(grid or (256, 16))))


# What changes after it was compiled -------------------------------------------------------------------------


def test_another_size_of_the_result_is_compiled_anew():
    own = ours().eval()
    fused = frozen(own).stage0
    compiled = Compiled(fused)
    compiled(images())
    for stage in (own.stage0, fused):
        stage.patch_embed.proj.stride = (8, 8)
    out, grid = compiled(images())
    assert grid == (8, 8)
    assert relative(out, own.stage0(images())[0]) < 1e-5
    assert compiled.counts == [1, 1]


def test_what_cannot_be_served_is_traced(part, served):
    _, fused, args = part
    mlp = (fused.blocks[0] if hasattr(fused, "blocks") else fused).mlp
    name = "fc1" if hasattr(mlp, "fc1") else "dense1"
    setattr(mlp, name, nn.Sequential(getattr(mlp, name), nn.Identity()))
    compiled = Compiled(fused)
    assert relative(compiled(*args)[0], fused(*args)[0]) < 1e-5
    assert (compiled.counts, served) == ([0], [])


def test_restored_and_frozen_again():
    own = ours().eval()
    fused = frozen(own)
    compiled = Compiled(fused.stage0)
    for change in (lambda: None, lambda: ck.restore(fused), lambda: ck.accelerate(fused, freeze=True)):
        change()
        assert relative(compiled(images())[0], own.stage0(images())[0]) < 1e-5
    assert compiled.counts == [1, 0, 1]
    ck.restore(fused)
    assert "_cvt_kernels_number" not in vars(fused.stage0)


# Which stage it is ------------------------------------------------------------------------------------------


def copies(fused):
    return copy.deepcopy(fused), copy.copy(fused), pickle.loads(pickle.dumps(fused))


def test_models_of_the_same_architecture_are_told_apart():
    fused, other = frozen(ours()).stage0, frozen(ours()).stage0
    compiled = Compiled(lambda stage, x: stage(x)[0])
    for stage in (fused, other, *copies(fused)):
        assert torch.equal(compiled(stage, images()), stage(images())[0])
    numbers = {stage._cvt_kernels_number for stage in (fused, other, *copies(fused))}
    assert len(numbers) == 5
    first = compiled(fused, images())
    other.blocks[0].mlp.fc2.bias.add_(1)
    assert torch.equal(compiled(fused, images()), first)
    assert not torch.equal(compiled(other, images()), first)


@pytest.mark.slow
def test_a_compiled_model_is_not_kept_alive():
    fused = frozen(ours())
    Compiled(fused)(images())
    known = weakref.ref(fused.stage0)
    number = fused.stage0._cvt_kernels_number
    del fused
    torch.compiler.reset()
    gc.collect()
    assert known() is None
    with pytest.raises(RuntimeError, match="is no longer frozen"):
        torch.ops.cvt_kernels.frozen_stage(images(), number, 256, 16)


# Where the blocks are traced --------------------------------------------------------------------------------


def test_training_mode_raises(part):
    _, fused, args = part
    compiled = Compiled(fused)
    fused.train()
    for enabled in (False, True):
        refused = pytest.raises(RuntimeError, match=r"is frozen for serving and cannot train.*restore")
        with torch.set_grad_enabled(enabled), refused:
            compiled(*args)
    fused.eval()
    assert torch.equal(compiled(*args)[0], fused(*args)[0])


def test_gradients_are_those_of_the_blocks(part, recwarn, served):
    own, fused, args = part
    compiled = Compiled(fused)
    with torch.enable_grad():
        compiled(*args)[0].sum().backward()
        own(*args)[0].sum().backward()
    assert (compiled.counts, served, len(recwarn)) == ([0], [], 0)
    for mine, theirs in zip(fused.parameters(), own.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * max(theirs.grad.abs().max(), 1)
    fused.requires_grad_(False)
    with torch.enable_grad():
        compiled(*args)
    assert (compiled.counts, len(served)) == ([0, 1], 1)


def test_under_autocast_the_blocks_are_traced():
    compiled = Compiled(frozen(ours()).stage0)
    compiled(images())
    with torch.autocast("cpu", torch.bfloat16):
        compiled(images())
    assert compiled.counts == [1, 0]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_the_blocks(part, strict):
    own, fused, args = part
    strict = strict and len(args) == 1
    program = torch.export.export(fused, args, strict=strict)
    assert not {STAGE, LAYER} & {str(node.target) for node in program.graph.nodes}
    assert relative(program.module()(*args)[0], own(*args)[0]) < 1e-5
