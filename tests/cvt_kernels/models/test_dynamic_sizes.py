"""Graphs of accelerated models hold for all sizes that the plain model's hold for."""

import copy
import functools

import pytest
import torch

import cvt_kernels as ck
from tests import upstream
from tests.upstream import Logits, images, logits, one_block, relative

FEW = {"depths": [1, 1]}


#: Small models by family, each with the sizes of four batches. PVT takes images of one size.
FAMILIES = {
    **{
        make.__name__: functools.partial(one_block, make)
        for make in (upstream.huggingface, upstream.microsoft, upstream.ours)
    },
    "segformer": lambda: upstream.segformer(**FEW),
    "pvt": lambda: upstream.pvt(**FEW),
    "pvt_v2": lambda: upstream.pvt_v2(**FEW),
    "pvt_v2_linear": lambda: upstream.pvt_v2_linear(**FEW),
    "glpn": upstream.glpn,
    "dinov2": upstream.dinov2,
}
SIZES = {name: [(2, 64, 96), (3, 96, 128), (9, 130, 70), (1, 64, 65)] for name in FAMILIES}
SIZES["pvt"] = [(2, 70, 70), (3, 70, 70), (9, 70, 70), (1, 70, 70)]
SIZES["glpn"] = [(2, 64, 96), (3, 96, 128), (9, 128, 64), (1, 64, 64)]

#: Those that make combinations runs besides those of make test; of the others make test-all takes care.
QUICK = "huggingface", "segformer", "pvt_v2"


def every_family(*quickest):
    """Parametrizes by families, a few of them for ``make test``."""
    tiers = dict.fromkeys(QUICK, pytest.mark.rest) | dict.fromkeys(quickest, ())
    marks = {name: tiers.get(name, pytest.mark.slow) for name in FAMILIES}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in FAMILIES])


def ways(name):
    """Yields the model as it was, then accelerated: block by block, and as it is served."""
    own = FAMILIES[name]().eval()
    yield own
    for freeze in (False, True):
        fused = copy.deepcopy(own)
        if name != "ours" or freeze:
            # Linear attention cannot be frozen.
            ck.accelerate(fused, freeze=None if freeze and name == "pvt_v2_linear" else freeze)
        yield fused


@torch.no_grad()
@every_family("segformer")
def test_exported_programs_take_all_sizes_that_the_models_take(name):
    own, *fused = ways(name)
    first, *others = SIZES[name]
    x = images(*first)
    sizes = {0: torch.export.Dim("batch", min=1, max=64)}
    if name == "glpn":  # whose decoder adds maps of twice the size to maps of the stage before
        sizes |= {i: 32 * torch.export.Dim(side, min=2, max=16) for i, side in ((2, "rows"), (3, "columns"))}
    elif name != "pvt":
        sizes |= {i: torch.export.Dim(side, min=64, max=512) for i, side in ((2, "height"), (3, "width"))}
    plain = torch.export.export(Logits(own), (x,), dynamic_shapes=(sizes,))
    for model in fused:
        program = torch.export.export(Logits(model), (x,), dynamic_shapes=(sizes,))
        assert program.range_constraints == plain.range_constraints
        for size in others:
            assert relative(program.module()(images(*size)), logits(own(images(*size)))) < 1e-5


@torch.no_grad()
@every_family("segformer")
def test_as_many_graphs_as_of_the_model(name):
    graphs = []

    def noted(graph, inputs):
        graphs.append(1)
        return graph.forward

    counts = []
    for model in ways(name):
        torch.compiler.reset()
        graphs.clear()
        own = copy.deepcopy(model)
        ck.restore(own)
        logits(model(images(*SIZES[name][0])))  # transformers installs hooks in the first call, under a lock
        compiled = torch.compile(model, backend=noted, dynamic=True)
        for size in SIZES[name][:3]:
            assert relative(logits(compiled(images(*size))), logits(own(images(*size)))) < 1e-5
        counts.append(len(graphs))
    assert counts == [counts[0]] * 3
