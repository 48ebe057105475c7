"""The bias of attention by position: every backend against the explicit matrix, and the table's gradient."""

import pytest
import torch
from torch.autograd import gradcheck

import cvt_kernels as ck
from cvt_kernels import verdicts
from cvt_kernels.records import PositionBias
from cvt_kernels.reference import gather_rows
from tests.checks import (
    assert_accurate,
    not_built,
    python_blocks,
    recorded_operators,
    remember_verdict,
    run_blocks,
    section_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
NATIVE = pytest.param("native", marks=needs_extension)
FORWARD = ["triton", "sdpa", NATIVE]
#: Grid of the tokens, grid of the keys, stride, class tokens.
GRIDS = [
    ((4, 6), (2, 3), 2, 0),
    ((3, 5), (2, 3), 2, 1),
    ((2, 20), (2, 20), 1, 1),  # more than a tile of columns
    ((4, 3), (2, 1), 3, 0),
    ((1, 1), (1, 1), 2, 1),
    ((2, 3), (3, 4), 1, 0),  # some offsets are those of no pair
]
SMALL = (2, 3), (1, 2), 2, 0


def make(grids, *, batch=2, heads=2, dim=8, dtype=torch.float64, table=1.0, rows=None):
    """Returns q, k, v and the bias; ``table`` is how far its numbers spread."""
    (height, width), (key_height, key_width), stride, class_tokens = grids
    tokens, keys = height * width + class_tokens, key_height * key_width + class_tokens
    queries = tokens if rows is None else rows.shape[1]
    q, k, v = (
        torch.randn(batch, n, heads, dim, dtype=torch.float64).to(DEVICE, dtype)
        for n in (queries, keys, keys)
    )
    sizes = heads, height + stride * (key_height - 1), width + stride * (key_width - 1)
    numbers = table * torch.randn(sizes, dtype=torch.float64)
    return q, k, v, PositionBias(numbers.to(DEVICE, dtype), *grids[:3], rows)


def by_hand(position, class_tokens):
    """Returns the matrix (h, T, Nkv) by loops over tokens and keys."""
    table, (height, width), (key_height, key_width), stride, _ = position
    tokens, keys = height * width + class_tokens, key_height * key_width + class_tokens
    bias = table.new_zeros(len(table), tokens, keys)
    for token in range(height * width):
        for key in range(key_height * key_width):
            down = token // width - stride * (key // key_width - key_height + 1)
            across = token % width - stride * (key % key_width - key_width + 1)
            bias[:, token + class_tokens, key + class_tokens] = table[:, down, across]
    return bias


def run(backend, q, k, v, position, *, scale=0.4, bias=None):
    """Returns the output and the gradients of q, k, v and the table."""
    live = [t.detach().requires_grad_() for t in (q, k, v, position.table)]
    with ck.use_backend(backend):
        out = ck.attention(*live[:3], scale=scale, bias=bias, position=position._replace(table=live[3]))
    return [out.detach(), *torch.autograd.grad(out, live, pattern_like(out))]


def pattern_like(out):
    """Returns a fixed pattern of output gradients."""
    return (
        torch.linspace(-1, 1, 7, dtype=out.dtype, device=DEVICE)
        .repeat(out.numel() // 7 + 1)[: out.numel()]
        .view_as(out)
    )


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("backend", ["reference", *FORWARD])
def test_forward_agrees_with_the_matrix_by_hand(backend, grids):
    q, k, v, position = make(grids)
    with torch.no_grad():
        with ck.use_backend(backend):
            out = ck.attention(q, k, v, scale=-0.4, position=position)
        with ck.use_backend("reference"):
            expected = ck.attention(q, k, v, scale=-0.4, bias=by_hand(position, grids[3]))
            plain = ck.attention(q, k, v, scale=-0.4)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if q.shape[1] > 2:
        assert (out - plain).abs().max() > 0.1


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_gradients_agree_with_the_matrix_by_hand(backend, grids):
    q, k, v, position = make(grids)
    ours = run(backend, q, k, v, position)
    live = [t.requires_grad_() for t in (q, k, v, position.table)]
    bias = by_hand(position._replace(table=live[3]), grids[3])
    with ck.use_backend("reference"):
        out = ck.attention(*live[:3], scale=0.4, bias=bias)
    expected = torch.autograd.grad(out, live, pattern_like(out))
    for a, b in zip(ours, [out.detach(), *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# Chosen queries -------------------------------------------------------------------------------------------

#: Tokens of two images of 3×5 and a class token, the second of which has fewer.
ROWS = torch.tensor([[0, 1, 2, 7, 11, 15], [0, 6, 14, -1, -1, -1]], device=DEVICE)


def loss_of(out, rows):
    """Weighs the results of what is no token with nothing, as in the model, where nothing reads them."""
    return (out * pattern_like(out) * (rows >= 0)[..., None, None]).sum()


@pytest.mark.parametrize("backend", ["reference", *FORWARD])
def test_chosen_queries_are_those_of_all_tokens(backend):
    q, k, v, position = make(GRIDS[1])
    some = gather_rows(q.flatten(2), ROWS).unflatten(2, (2, -1))
    with torch.no_grad(), ck.use_backend(backend):
        whole = ck.attention(q, k, v, position=position)
        out = ck.attention(some, k, v, position=position._replace(rows=ROWS))
    expected = gather_rows(whole.flatten(2), ROWS).unflatten(2, (2, -1))
    torch.testing.assert_close(out[ROWS >= 0], expected[ROWS >= 0], rtol=1e-12, atol=1e-12)
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_gradients_of_chosen_queries(backend):
    q, k, v, position = make(GRIDS[1], rows=ROWS)
    gradients = []
    for name in (backend, "reference"):
        live = [t.detach().requires_grad_() for t in (q, k, v, position.table)]
        with ck.use_backend(name):
            out = ck.attention(*live[:3], position=position._replace(table=live[3]))
        gradients.append(torch.autograd.grad(loss_of(out, ROWS), live))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    assert gradients[0][3].abs().max() > 1e-3


# Zeros, and accuracy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", *FORWARD])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_zeros_leave_every_bit(backend, dtype, scale):
    q, k, v, position = make(((9, 11), (5, 6), 2, 1), batch=1, dtype=dtype, table=0.0)
    with torch.no_grad(), ck.use_backend(backend):
        plain = ck.attention(q, k, v, scale=scale)
        assert torch.equal(ck.attention(q, k, v, scale=scale, position=position), plain)
        other = position._replace(table=torch.ones_like(position.table).cumsum(2))
        assert not torch.equal(ck.attention(q, k, v, scale=scale, position=other), plain)


@pytest.mark.parametrize("width", [5, 70])  # the backward in one launch, and in two
def test_zeros_leave_every_bit_of_the_gradients(width):
    grids = (1, width), (1, width), 1, 0
    q, k, v, position = make(grids, batch=1, heads=1, dtype=torch.float32, table=0.0)
    *ours, _ = run("triton", q, k, v, position)
    live = [t.requires_grad_() for t in (q, k, v)]
    with ck.use_backend("triton"):
        out = ck.attention(*live, scale=0.4)
    for a, b in zip(ours, [out, *torch.autograd.grad(out, live, pattern_like(out))], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["triton", NATIVE])
def test_accuracy(backend, dtype):
    """At the second stage's width, with scores that the bias dominates."""
    q, k, v, position = make(((6, 28), (3, 14), 2, 0), batch=1, dim=64, dtype=dtype, table=4.0)
    exact = (t.double() for t in (q, k, v))
    with torch.no_grad():
        with ck.use_backend("reference"):
            expected = ck.attention(
                *exact, scale=0.05, position=position._replace(table=position.table.double())
            )
            theirs = ck.attention(q, k, v, scale=0.05, position=position)
        with ck.use_backend(backend):
            ours = ck.attention(q, k, v, scale=0.05, position=position)
    assert_accurate(ours, theirs, expected, floor=4.0)


def test_accuracy_of_gradients():
    tensors = make(((3, 28), (2, 14), 2, 1), batch=1, dim=64, dtype=torch.float16)
    *numbers, position = tensors
    wide = [t.double() for t in numbers], position._replace(table=position.table.double())
    exact = run("reference", *wide[0], wide[1], scale=0.1)
    results = run("triton", *tensors, scale=0.1), run("reference", *tensors, scale=0.1), exact
    for i, (ours, theirs, right) in enumerate(zip(*results, strict=True)):
        assert_accurate(ours, theirs, right, factor=3 if i else 2, floor=4)


@pytest.mark.parametrize("grids", [SMALL, GRIDS[4]], ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_gradcheck(backend, grids):
    q, k, v, position = make(grids, batch=1, heads=1, dim=3)

    def function(q, k, v, table):
        with ck.use_backend(backend):
            return ck.attention(q, k, v, scale=0.7, position=position._replace(table=table))

    live = tuple(t.requires_grad_() for t in (q, k, v, position.table))
    assert gradcheck(function, live, fast_mode=True)


def test_the_gradient_has_the_same_bits_every_time():
    tensors = make(SMALL, batch=3, heads=1, dtype=torch.float32)
    first = run("triton", *tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, run("triton", *tensors), strict=True))


def test_a_table_and_another_bias_together():
    q, k, v, position = make(GRIDS[1], heads=1)
    bias = torch.randn(16, 7, dtype=torch.float64, device=DEVICE)
    results = [run(name, q, k, v, position, bias=bias) for name in ("triton", "reference")]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@needs_extension
def test_any_number_of_threads_and_blocks_of_keys():
    """More keys than a block of the CPU kernels, which then begin in the midst of a row of keys."""
    q, k, v, position = make(((16, 17), (16, 17), 1, 1), batch=1, dtype=torch.float32)
    threads = torch.get_num_threads()
    with torch.no_grad(), ck.use_backend("native"):
        out = ck.attention(q, k, v, position=position)
        try:
            torch.set_num_threads(3)
            assert torch.equal(ck.attention(q, k, v, position=position), out)
        finally:
            torch.set_num_threads(threads)
    with torch.no_grad(), ck.use_backend("reference"):
        expected = ck.attention(q, k, v, position=position)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


# The rest of the interface --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key_grid": (3, 3)}, ValueError, r"position.key_grid: got 3×3 for 7 keys"),
        ({"query_grid": (5, 6)}, ValueError, r"position.query_grid: got 5×6 for 16 queries, expected 31"),
        ({"stride": 0}, ValueError, "position.stride: got 0, expected an integer of at least 1"),
        ({"stride": 1}, ValueError, r"position.table: got shape \(2, 5, 9\), expected \(2, 4, 7\)"),
        ({"table": torch.zeros(1, 5, 9)}, ValueError, r"position.table: got shape .* expected \(2, 5, 9\)"),
        ({"table": torch.zeros(5, 9)}, ValueError, "position.table: got shape .* expected 3 dimensions"),
        ({"table": torch.zeros(2, 5, 9).half()}, TypeError, "position.table: has dtype float16"),
        ({"table": torch.zeros(2, 5, 9, device="meta")}, ValueError, "position.table: is on meta"),
        ({"table": None}, TypeError, "position.table: got NoneType"),
        (
            {"rows": torch.zeros(2, 16)},
            TypeError,
            "position.rows: got dtype float32, expected int64",
        ),
        ({"rows": [0]}, TypeError, "position.rows: got list, expected a tensor"),
        ({"rows": torch.zeros(2, 15).long()}, ValueError, r"position.rows: got shape \(2, 15\)"),
    ],
)
def test_bad_positions(change, error, message):
    q, k, v, position = make(GRIDS[1], dtype=torch.float32)
    position = position._replace(table=position.table.cpu())
    with pytest.raises(error, match=message):
        ck.attention(q.cpu(), k.cpu(), v.cpu(), position=position._replace(**change))


def test_a_position_of_another_type():
    q, k, v, _ = make(GRIDS[1])
    with pytest.raises(TypeError, match="position: got tuple, expected PositionBias"):
        ck.attention(q, k, v, position=(1, 2))


@pytest.mark.parametrize("backend", ["triton", NATIVE])
def test_a_scale_of_zero_is_left_to_others(backend):
    q, k, v, position = make(GRIDS[1])
    reason = "the scale 0.0 is too close to 0 to divide"
    with torch.no_grad(), ck.use_backend(backend), pytest.raises(ck.BackendUnavailable, match=reason):
        ck.attention(q, k, v, scale=0.0, position=position)
    with torch.no_grad(), ck.use_backend("sdpa"):
        out = ck.attention(q, k, v, scale=0.0, position=position)
    probabilities = by_hand(position, 1).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("hqk,bkhd->bqhd", probabilities, v))


@needs_extension
def test_gradients_of_the_table_alone_are_left_to_others():
    q, k, v, position = make(GRIDS[1])
    live = position._replace(table=position.table.requires_grad_())
    with ck.use_backend("native"), pytest.raises(ck.BackendUnavailable, match="has no gradients on a CPU"):
        ck.attention(q, k, v, position=live)


@needs_extension
def test_auto_takes_the_kernel_by_verdict():
    q, k, v, position = make(GRIDS[1], dtype=torch.float32)
    settings = {"scale": None, "bias": None, "dropout_p": 0.0, "position": position}
    remember_verdict("native", "attention", q, k, v, **settings)
    with torch.no_grad(), recorded_operators() as called:
        for _ in range(2):
            ck.attention(q, k, v, position=position)
        ck.attention(q, k, v)  # a call of another kind
    assert called.count("cvt_kernels.attention_by_position.default") == 2
    assert sum("flash_attention" in name for name in called) == 1


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.usefixtures("proving")
def test_proofs_take_a_table(with_rows):
    q, k, v, position = make(GRIDS[1], dtype=torch.float32, rows=ROWS.cpu() if with_rows else None)
    with torch.no_grad():
        out = ck.attention(q.cpu(), k.cpu(), v.cpu(), position=position)
    with torch.no_grad(), ck.use_backend("reference"):
        expected = ck.attention(q, k, v, position=position)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    (question,) = verdicts.store_for(torch.device("cpu")).verdicts()
    assert question.endswith("fixed bias by position" + (" of chosen queries" if with_rows else ""))


@pytest.mark.parametrize("backend", ["triton", "sdpa", NATIVE])
def test_autocast_reads_a_table_in_float32(backend):
    q, k, v, position = make(GRIDS[1], dtype=torch.float32)
    with torch.no_grad(), ck.use_backend(backend), torch.autocast(DEVICE, torch.bfloat16):
        out = ck.attention(q, k.bfloat16(), v, scale=0.3, position=position)
    wide = [t.bfloat16().double() for t in (q, k, v)]
    with torch.no_grad(), ck.use_backend("reference"):
        exact = ck.attention(*wide, scale=0.3, position=position._replace(table=position.table.double()))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-2)


def test_operators_under_compile_are_registered_rightly():
    q, k, v, position = make(SMALL, dtype=torch.float32, batch=1, heads=1)
    live = [t.requires_grad_() for t in (q, k, v, position.table)]
    places = [2, 3, 1, 2, 2]
    with ck.use_backend("triton"), torch.no_grad():
        ck.attention(*live[:3])  # registers them
    operator = torch.ops.cvt_kernels.attention.default
    torch.library.opcheck(operator, (*live[:3], None, 0.3, True, live[3], None, places))


def test_a_compiled_call_has_the_gradients():
    q, k, v, position = make(SMALL, dtype=torch.float32, batch=1, heads=1)
    expected = run("triton", q, k, v, position)
    live = [t.requires_grad_() for t in (q, k, v, position.table)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q, k, v, table):
        return ck.attention(q, k, v, scale=0.4, position=position._replace(table=table))

    with ck.use_backend("triton"):
        out = function(*live)
        gradients = torch.autograd.grad(out, live, pattern_like(out))
    for a, b in zip([out, *gradients], expected, strict=True):
        assert torch.equal(a, b)


# attention_map --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_rows", [False, True])
def test_map_has_the_probabilities_of_attention(with_rows):
    q, k, v, position = make(GRIDS[1], rows=ROWS if with_rows else None)
    with ck.use_backend("reference"):
        out = ck.attention(q, k, v, scale=0.3, position=position)
    seen = ck.attention_map(q, k, rows=[0, 3, -1], scale=0.3, position=position).probabilities
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", seen, v), out[:, [0, 3, -1]])
    with pytest.raises(ValueError, match=r"position\.stride"):
        ck.attention_map(q, k, position=position._replace(stride=0))


def test_the_page_about_attention_runs():
    names = run_blocks(python_blocks(section_of("inside.md", "## attention")))
    assert names["out"].shape == names["queries"].shape


@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])
def test_queries_that_are_no_tokens_are_refused(backend):
    q, kv, table = torch.randn(1, 2, 1, 8), torch.randn(1, 4, 1, 8), torch.randn(1, 5, 5)
    position = ck.PositionBias(table, (4, 4), (2, 2), 1, torch.tensor([[3, 16]]))
    with (
        ck.use_backend(backend),
        pytest.raises(ValueError, match=r"position\.rows: got 16, expected the tokens 0 to 15, or -1"),
    ):
        ck.attention(q, kv, kv, position=position)
