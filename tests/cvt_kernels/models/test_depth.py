"""GLPN's decoder hands its last map to the head, which computes the depth by one operator."""

import copy

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels.models import heads
from tests import upstream
from tests.checks import assert_accurate, not_built

pytestmark = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@pytest.fixture
def maps(monkeypatch):
    """Returns the shapes of the maps that the operator gets, and lets kernels serve on a CPU."""
    shapes, operator = [], ck.depth_head

    def noting(x, *others):
        shapes.append(tuple(x.shape))
        return operator(x, *others)

    monkeypatch.setattr(heads, "depth_head", noting)
    with ck.use_backend("cpu", "reference"):
        yield shapes


def made(dtype=torch.float32, freeze=None, **config):
    """Returns a model with other statistics than those of its first day, accelerated, and upstream's."""
    torch.manual_seed(0)
    model = upstream.glpn(**config).eval().to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return ck.accelerate(copy.deepcopy(model), freeze=freeze), model


@pytest.mark.parametrize("freeze", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_depths_are_accurate(maps, dtype, freeze):
    ours, upstreams = made(dtype, freeze)
    images = torch.randn(2, 3, 64, 96, dtype=dtype)
    exact = copy.deepcopy(upstreams).double()(images.double()).predicted_depth
    assert_accurate(ours(images).predicted_depth, upstreams(images).predicted_depth, exact)
    assert maps == [(2, 8, 16, 24)]


@torch.no_grad()
def test_all_outputs_are_upstreams(maps):
    ours, upstreams = made()
    images = torch.randn(1, 3, 32, 64)
    for arguments in (
        {"labels": torch.rand(1, 32, 64) + 1},
        {"return_dict": False, "output_hidden_states": True},
    ):
        got, expected = (model(images, **arguments) for model in (ours, upstreams))
        assert type(got) is type(expected)
        got, expected = (each if type(each) is tuple else each.to_tuple() for each in (got, expected))
        torch.testing.assert_close(got, expected)
    assert len(maps) == 2


PARTS = [
    *("decoder", "head", "head.head", "head.head.0", "head.head.1", "head.head.2"),
    *("decoder.stages.3", "decoder.stages.3.upsample", "decoder.final_upsample"),
]


@pytest.mark.parametrize("path", PARTS)
@torch.no_grad()
def test_a_hook_sees_what_it_sees_upstream(maps, path):
    ours, upstreams = made()
    images = torch.randn(1, 3, 32, 64)
    ours(images)
    seen = []
    for model in (ours, upstreams):
        model.get_submodule(path).register_forward_hook(lambda module, args, out: seen.append((args, out)))
        model(images)
    torch.testing.assert_close(*seen)
    assert len(maps) == 1  # of the call before


@torch.no_grad()
def test_the_decoder_and_the_head_called_by_themselves_run_their_own_forward(maps):
    ours, upstreams = made()
    states = ours.glpn(torch.randn(1, 3, 32, 64), output_hidden_states=True).hidden_states
    got, expected = ours.decoder(states), upstreams.decoder(states)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours.head(got), upstreams.head(expected))
    assert not maps


def test_training_and_gradients_run_upstreams_forward(maps):
    ours, upstreams = made()
    images = torch.randn(2, 3, 32, 64)
    for training in (False, True):
        torch.manual_seed(1)
        losses = [
            model.train(training)(images).predicted_depth.square().mean() for model in (ours, upstreams)
        ]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    gradients = [model.head.head[0].weight.grad for model in (ours, upstreams)]
    torch.testing.assert_close(*gradients)
    assert not maps


@torch.no_grad()
def test_a_head_that_reads_another_map_runs_its_own_forward(maps):
    ours, upstreams = made(head_in_index=1)
    images = torch.randn(1, 3, 32, 64)
    torch.testing.assert_close(ours(images).predicted_depth, upstreams(images).predicted_depth)
    assert not maps


@torch.no_grad()
def test_coverage_lists_it_and_restore_undoes_it(maps):
    ours, _ = made()
    rows = {row.path: row for row in ck.coverage(ours)}
    assert all(rows[path].fused for path in ("", "decoder", "head"))
    assert type(ck.restore(ours).decoder) is type(upstream.glpn().decoder)
    ours(torch.randn(1, 3, 32, 64))
    assert not maps
