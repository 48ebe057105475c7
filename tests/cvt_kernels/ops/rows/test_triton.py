"""The Triton kernels on rows of tokens, on a GPU or else in Triton's interpreter."""

import pytest
import torch
from torch.autograd import forward_ad

import cvt_kernels as ck
from cvt_kernels import checks, launching, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(batch=2, tokens=9, count=5, channels=24, dtype=torch.float32):
    """Returns tokens, an index with -1 in it, and values."""
    x = torch.randn(batch, tokens, channels).to(DEVICE, dtype)
    rows = torch.stack([torch.randperm(tokens)[:count] for _ in range(batch)]).to(DEVICE)
    rows[0, -1] = -1
    return x, rows, torch.randn(batch, count, channels).to(DEVICE, dtype)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 600, 520, 1), (3, 40, 33, 8), (1, 3, 2, 1200), (2, 9, 5, 384)], ids=str
)
def test_sizes_of_which_no_tile_is_full(shape):
    batch, tokens, count, channels = shape
    x, rows, values = make(batch, tokens, count, channels)
    with ck.use_backend("triton"), torch.no_grad():
        assert torch.equal(ck.gather_rows(x, rows), reference.gather_rows(x, rows))
        assert torch.equal(
            ck.scatter_rows(x, rows, values, values), reference.scatter_rows(x, rows, values, values)
        )
        ours = ck.gather_add_layer_norm(x, rows, values)
    torch.testing.assert_close(ours, reference.gather_add_layer_norm(x, rows, values))


def test_programs_of_several_tiles_add_up_all_rows():
    x, rows, values = make(3, 60, 50, 64)
    leaves = [values.requires_grad_(), *(torch.randn(64, device=DEVICE, requires_grad=True) for _ in "ab")]

    def gradients():
        _, y = ck.gather_add_layer_norm(x, rows, *leaves)
        return torch.autograd.grad(y.sin().sum(), leaves)

    with ck.use_backend("triton"):
        with launching.intercepted_launches(lambda launch: launches.append(launch) or launch.start()):
            launches = []
            first = gradients()
        again = gradients()
    assert all(map(torch.equal, first, again))
    backward = launches[-1]
    assert backward.kernel.__name__ == "_gather_add_layer_norm_backward_kernel"
    if DEVICE == "cpu":
        assert backward.arguments["tiles"] > backward.grid[0]
    with ck.use_backend("reference"):
        torch.testing.assert_close(first, gradients(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_tokens_are_read_where_they_lie():
    x, rows, values = make()
    for call in (
        lambda: ck.gather_rows(x[:, 1:], rows),
        lambda: ck.gather_add_layer_norm(x[:, 1:], rows, values),
        lambda: ck.scatter_rows(x[:, 1:], rows, values),
    ):
        with ck.use_backend("triton"), launching.recorded_launches(launching.Chip(90, 132)) as launches:
            call()
        assert launches[-1].arguments["x_ptr"].data_ptr() == x[:, 1:].data_ptr()


@pytest.mark.parametrize("outside", [9, -3, 2**32 + 1, -(2**40)])
@torch.no_grad()
def test_rows_that_x_does_not_have_count_as_none(outside, monkeypatch):
    monkeypatch.setattr(checks, "check_row_values", lambda *args: None)  # as on a GPU
    x, rows, values = make()
    rows[1, 2] = -1
    wrong = torch.where(rows < 0, torch.tensor(outside, device=DEVICE), rows)
    in_place = [x.clone(), x.clone()]
    with ck.use_backend("triton"):
        for index, out in zip((rows, wrong), in_place, strict=True):
            ck.scatter_rows(out, index, values, inplace=True)
        ours = [ck.gather_rows(x, wrong), *ck.gather_add_layer_norm(x, wrong, values)]
        ours.append(ck.scatter_rows(x, wrong, values))
    expected = [reference.gather_rows(x, rows), *reference.gather_add_layer_norm(x, rows, values)]
    expected.append(reference.scatter_rows(x, rows, values))
    torch.testing.assert_close(ours, expected)
    assert torch.equal(*in_place)


def test_calls_that_are_not_served():
    x, rows, values = make()
    with ck.use_backend("triton"):
        with pytest.raises(ck.BackendUnavailable, match="the batch is empty"):
            ck.gather_rows(x, rows[:, :0])
        wide = torch.randn(1, 2, 5000, device=DEVICE)
        with pytest.raises(ck.BackendUnavailable, match="tokens have 5000 channels, more than 4096"):
            ck.gather_rows(wide, torch.zeros(1, 1, dtype=torch.int64, device=DEVICE))
        with forward_ad.dual_level(), pytest.raises(ck.BackendUnavailable, match="forward-mode"):
            ck.scatter_rows(x, rows, values)


@pytest.mark.gpu
@torch.no_grad()
def test_calls_are_captured_into_graphs():
    x, rows, values = make(8, 197, 138, 384, torch.bfloat16)
    vector = torch.randn(384, device=DEVICE, dtype=torch.bfloat16)

    def run():
        h, y = ck.gather_add_layer_norm(x, rows, values, vector, vector)
        return ck.scatter_rows(x, rows, h, y), ck.gather_rows(x, rows)

    with ck.use_backend("triton"):
        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
    assert all(map(torch.equal, captured, expected))
