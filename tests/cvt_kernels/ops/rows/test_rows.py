"""Rows of tokens: a loop, autocast, torch.compile in place, and what is refused."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels.ops.rows import gather_rows, scatter_rows
from tests.checks import CPU_KERNELS

BATCH, TOKENS, CHANNELS, COUNT = 2, 7, 6, 4
ROWS = torch.tensor([[0, 2, 3, 6], [5, 1, -1, -1]])
every_backend = pytest.mark.parametrize("backend", ["reference", CPU_KERNELS])


def randn(*shape, dtype=torch.float32, **options):
    return torch.randn(shape, dtype=dtype, **options)


def tokens(**options):
    return randn(BATCH, TOKENS, CHANNELS, **options)


def values(**options):
    return randn(BATCH, COUNT, CHANNELS, **options)


@every_backend
def test_values_are_those_of_a_loop(backend):
    x, added, branch = tokens(), values(), values()
    with ck.use_backend(backend), torch.no_grad():
        out = gather_rows(x, ROWS)
        put, alone = scatter_rows(x, ROWS, added, branch), scatter_rows(x, ROWS, added)
    expected, expected_alone = x.clone(), x.clone()
    for image in range(BATCH):
        for k, token in enumerate(ROWS[image].tolist()):
            row = x[image, token] if token >= 0 else torch.zeros(CHANNELS)
            assert torch.equal(out[image, k], row)
            if token >= 0:
                expected[image, token] = added[image, k] + branch[image, k]
                expected_alone[image, token] = added[image, k]
    torch.testing.assert_close(put, expected)
    assert torch.equal(alone, expected_alone)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_may_differ_under_autocast(backend, dtype):
    x, branch = tokens(), values().to(dtype)
    calls = {
        "put": lambda: (scatter_rows(x, ROWS, branch, branch), scatter_rows(x, ROWS, values(), branch)),
        "16 bits": lambda: (scatter_rows(x.to(dtype), ROWS, values(), branch), gather_rows(x, ROWS)),
    }
    for name, call in calls.items():
        results = []
        for chosen in (backend, "reference"):
            torch.manual_seed(3)
            with ck.use_backend(chosen), torch.autocast("cpu", dtype):
                results.append(call())
        ours, theirs = results
        assert [t.dtype for t in ours] == [t.dtype for t in theirs], name
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@every_backend
@torch.no_grad()
def test_torch_compile_writes_in_place(backend):
    def run(x, rows, added):
        y = x * 2
        scatter_rows(y, rows, added, inplace=True)
        return scatter_rows(y + 1, rows, added, added, inplace=True), y

    x, added = tokens(), values()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
    with ck.use_backend(backend):
        torch.testing.assert_close(compiled(x, ROWS, added), run(x, ROWS, added))


@every_backend
@pytest.mark.parametrize("row", [TOKENS, 2**40])
def test_tokens_that_x_does_not_have(backend, row):
    rows = ROWS.clone()
    rows[1, 2] = row
    with ck.use_backend(backend), pytest.raises(ValueError, match=f"rows: got {row}, expected the tokens 0"):
        scatter_rows(tokens(), rows, values())


def test_values_in_the_memory_of_x_are_refused_in_place():
    x = tokens()
    before = x.clone()
    for name, given in (("values", (x[:, :COUNT], None)), ("branch", (values(), x[:, 1 : 1 + COUNT]))):
        with pytest.raises(ValueError, match=f"{name}: shares memory with x"), torch.no_grad():
            scatter_rows(x, ROWS, *given, inplace=True)
    assert torch.equal(x, before)
