"""Frozen stages under torch.compile on a CPU, where each is one operator."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels.acceleration import freezing, stages
from tests.upstream import UPSTREAMS, images, logits, microsoft, ours, relative

MODELS = [*UPSTREAMS, ours]
OPERATOR = "cvt_kernels.frozen_stage.default"

calls = []


@pytest.fixture(autouse=True)
def _without_gradients(monkeypatch):
    """Runs tests without gradients; counts the stages that are served as one, in ``calls``."""

    def serve(*args):
        calls.append(args)
        return stages.serve(*args)

    calls.clear()
    monkeypatch.setattr(freezing, "serve", serve)
    torch.compiler.reset()
    with torch.no_grad():
        yield


def frozen(model):
    """Returns a frozen copy of a model in evaluation."""
    return ck.accelerate(copy.deepcopy(model).eval(), freeze=True)


class Compiled:
    """A compiled model, whose graphs are listed by the operators that they call."""

    def __init__(self, model, **settings):
        self.graphs = []
        self.model = torch.compile(model, fullgraph=True, backend=self._note, **settings)

    def _note(self, graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.graphs.append(targets)
        return graph.forward

    def __call__(self, *args):
        return self.model(*args)

    def stages(self):
        """Returns how many stages are operators in the latest graph."""
        return self.graphs[-1].count(OPERATOR)


@pytest.mark.parametrize("make", MODELS)
def test_each_stage_is_one_operator(make):
    fused = frozen(make())
    compiled = Compiled(fused, dynamic=True)
    for batch in (2, 3):
        out = logits(compiled(images(batch)))
        assert relative(out, logits(fused(images(batch)))) < 1e-6  # not the same bits in torch 2.11
    assert (len(compiled.graphs), compiled.stages(), len(calls)) == (1, 3, 12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, about itself
def test_inductor_with_freezing():
    from torch._inductor import config

    fused = frozen(ours()).stage0
    x = images()
    with config.patch(freezing=True):
        compiled = torch.compile(fused, fullgraph=True)
        tokens, grid = compiled(x)
        expected = fused(x)
        assert grid == expected[1]
        assert torch.equal(tokens, expected[0])
        fused.patch_embed.norm.bias.add_(1)
        assert torch.equal(compiled(x)[0], fused(x)[0])
    assert len(calls) == 4


def test_the_operator_is_as_pytorch_expects():
    stage = frozen(ours()).stage0
    number = stage._cvt_kernels_number
    torch.library.opcheck(torch.ops.cvt_kernels.frozen_stage.default, (images(), number, 256, 16))


# What changes after it was compiled -------------------------------------------------------------------------


def bias_in_place(stage):
    stage.blocks[0].mlp.fc2.bias.add_(1)


def another_parameter(stage):
    stage.blocks[0].mlp.fc1.weight = nn.Parameter(stage.blocks[0].mlp.fc1.weight * 2)


def another_eps(stage):
    stage.blocks[0].norm1.eps = 1.0


@pytest.mark.parametrize("change", [bias_in_place, another_parameter, another_eps])
def test_a_change_within_is_noticed_by_the_operator(change):
    own = ours().eval()
    fused = frozen(own).stage0
    compiled = Compiled(fused)
    before = compiled(images())[0]
    change(own.stage0)
    change(fused)
    out, expected = compiled(images())[0], own.stage0(images())[0]
    assert relative(before, expected) > 1e-3
    assert relative(out, expected) < 1e-5
    assert (len(compiled.graphs), len(calls)) == (1, 2)


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
    assert (len(compiled.graphs), compiled.stages()) == (2, 1)


def test_a_hook_within_fires():
    fused = frozen(microsoft()).stage2
    x = torch.randn(2, 32, 8, 8)
    compiled = Compiled(fused)
    before, seen = compiled(x), []
    fused.blocks[0].norm2.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    after = compiled(x)
    assert (len(compiled.graphs), len(seen), len(calls)) == (1, 1, 1)
    assert all(relative(a, b) < 1e-5 for a, b in zip(after, before, strict=True))


def test_a_stage_that_cannot_be_served_is_traced():
    fused = frozen(ours()).stage1
    fused.blocks[0].mlp.fc1 = nn.Sequential(fused.blocks[0].mlp.fc1, nn.Identity())
    compiled = Compiled(fused)
    x = torch.randn(2, 16, 8, 8)
    assert relative(compiled(x)[0], fused(x)[0]) < 1e-5
    assert (compiled.stages(), calls) == (0, [])


def test_restored_and_frozen_again():
    own = ours().eval()
    fused = frozen(own)
    compiled = Compiled(fused.stage0)
    counts = []
    for change in (lambda: None, lambda: ck.restore(fused), lambda: ck.accelerate(fused, freeze=True)):
        change()
        assert relative(compiled(images())[0], own.stage0(images())[0]) < 1e-5
        counts.append(compiled.stages())
    assert counts == [1, 0, 1]
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
    calls.clear()
    del fused
    torch.compiler.reset()
    gc.collect()
    assert known() is None
    with pytest.raises(RuntimeError, match="is no longer frozen"):
        torch.ops.cvt_kernels.frozen_stage(images(), number, 256, 16)


# Where the blocks are traced --------------------------------------------------------------------------------


def test_training_mode_raises():
    fused = frozen(ours()).stage0
    compiled = Compiled(fused)
    fused.train()
    for enabled in (False, True):
        refused = pytest.raises(RuntimeError, match=r"is frozen for serving and cannot train.*restore")
        with torch.set_grad_enabled(enabled), refused:
            compiled(images())
    fused.eval()
    assert torch.equal(compiled(images())[0], fused(images())[0])


def test_gradients_are_those_of_the_blocks(recwarn):
    own = ours().eval()
    fused = frozen(own).stage0
    compiled = Compiled(fused)
    with torch.enable_grad():
        compiled(images())[0].sum().backward()
        own.stage0(images())[0].sum().backward()
    assert (compiled.stages(), calls, len(recwarn)) == (0, [], 0)
    for mine, theirs in zip(fused.parameters(), own.stage0.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * max(theirs.grad.abs().max(), 1)
    fused.requires_grad_(False)
    with torch.enable_grad():
        compiled(images())
    assert (compiled.stages(), len(calls)) == (1, 1)


def test_under_autocast_the_blocks_are_traced():
    fused = frozen(ours()).stage0
    compiled = Compiled(fused)
    compiled(images())
    with torch.autocast("cpu", torch.bfloat16):
        compiled(images())
    assert [graph.count(OPERATOR) for graph in compiled.graphs] == [1, 0]


@pytest.mark.parametrize("wrong", [torch.randn(2, 4, 64, 64), torch.randn(2, 3, 64, 64).double()])
def test_wrong_images_get_the_errors_of_the_blocks(wrong):
    fused = frozen(ours()).stage0
    compiled = torch.compile(fused, backend="eager")
    compiled(images())
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        compiled(wrong)
    assert len(calls) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_the_blocks(strict):
    fused = frozen(ours()).stage0
    program = torch.export.export(fused, (images(),), strict=strict)
    assert OPERATOR not in {str(node.target) for node in program.graph.nodes}
    assert relative(program.module()(images())[0], fused(images())[0]) < 1e-5


def test_copies_of_state_that_is_no_dictionary_are_as_they_are():
    assert freezing.without_number((1, 2)) == (1, 2)
