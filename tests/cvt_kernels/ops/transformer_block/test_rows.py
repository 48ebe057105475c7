"""transformer_block of some tokens: every backend against float64, its scores, and what it refuses."""

import pytest
import torch
from torch.autograd import gradcheck

import cvt_kernels as ck
from cvt_kernels import checks, dispatch, proofs, reference
from cvt_kernels.ops import token_selection
from tests.checks import assert_accurate, every_instruction_set, not_built, run_on_instruction_set
from tests.cvt_kernels.ops.transformer_block.test_quantized import decibels, with_quantized
from tests.cvt_kernels.ops.transformer_block.test_transformer_block import (
    BACKENDS,
    every_backend,
    in_float64,
    make,
)

needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


def some_rows(x, grid, kept, seed=0):
    """Returns the rows (B, kept) of a call; the class token is among them, and the second image has fewer."""
    generator = torch.Generator().manual_seed(seed)
    batch, tokens = x.shape[:2]
    class_tokens = tokens - grid[0] * grid[1]
    rows = torch.zeros(batch, kept, dtype=torch.int64)
    for image in rows:
        spatial = torch.randperm(tokens - class_tokens, generator=generator)[: kept - class_tokens]
        image[class_tokens:] = spatial.sort().values + class_tokens
    if batch > 1 and kept > 2:
        rows[1, -2:] = -1
    return rows


def is_computed(x, rows):
    """Returns which tokens (B, T, 1) are among the rows."""
    return (rows[:, :, None] == torch.arange(x.shape[1])).any(1)[..., None]


def call(backend, arguments, **settings):
    with torch.no_grad(), ck.use_backend(*BACKENDS[backend]):
        return ck.transformer_block(*arguments, **settings)


def check(backend, arguments, rows, scores):
    """Compares a call, a second one like it, and one in place, with the reference and with float64."""
    x, grid, block = arguments
    settings = {"rows": rows, "scores": scores}
    same = reference.transformer_block(*arguments, **settings)
    exact = reference.transformer_block(*in_float64(arguments), **settings)
    out, received = call(backend, arguments, **settings)
    again, same_received = call(backend, arguments, **settings)
    assert torch.equal(again, out)
    assert torch.equal(same_received, received)
    stream = x.clone()
    assert call(backend, (stream, grid, block), **settings, inplace=True)[0] is stream
    assert torch.equal(stream, out)
    assert torch.equal(call(backend, arguments, rows=rows), out)  # scores change nothing
    assert torch.equal(torch.where(is_computed(x, rows), x, out), x)
    assert not torch.equal(out, x)
    assert_accurate(out, same[0], exact[0], floor=4)
    assert received.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(received.sum(1), torch.full_like(received[:, 0], block.num_heads))
    if x.dtype in (torch.float32, torch.float64):
        assert_accurate(received, same[1], exact[1], floor=8)
    else:  # a single query decides about their error
        torch.testing.assert_close(received.double(), exact[1].double(), rtol=0, atol=0.05)


@every_backend
@pytest.mark.parametrize(("class_tokens", "scores"), [(0, "avg"), (1, "avg"), (1, "cls")])
@pytest.mark.parametrize("kept", [3, 11, 20])
def test_values(backend, kept, class_tokens, scores):
    arguments = make(class_tokens=class_tokens, batch=3)
    check(backend, arguments, some_rows(*arguments[:2], kept), scores)


@every_backend
def test_bfloat16(backend):
    arguments = make(dtype=torch.bfloat16, class_tokens=1, channels=48, approximate="quick")
    check(backend, arguments, some_rows(*arguments[:2], 9), "cls")


@pytest.mark.parametrize(("backend", "dtype"), [("native", torch.float16), ("composed", torch.float64)])
def test_other_dtypes(backend, dtype):
    arguments = make(dtype=dtype, class_tokens=1)
    check(backend, arguments, some_rows(*arguments[:2], 9), "avg")


@every_backend
@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ({"batch": 1, "grid": (1, 1)}, 1),
        ({"batch": 3, "grid": (7, 1), "channels": 21, "heads": 7}, 4),
        ({"grid": (3, 8), "strides": (1, 3, 3), "channels": 20, "width": 36, "heads": 2}, 23),
        ({"grid": (13, 14), "heads": 2, "width": 96, "scale": 0.1}, 150),  # in several tiles
    ],
    ids=str,
)
def test_odd_sizes(backend, sizes, kept):
    arguments = make(**sizes)
    check(backend, arguments, some_rows(*arguments[:2], kept), "avg")


@every_backend
def test_rows_of_all_tokens_are_the_whole_block(backend):
    x, *_ = arguments = make(class_tokens=1, batch=3)
    rows = torch.arange(x.shape[1]).expand(3, -1)  # strided, too
    out, whole = call(backend, arguments, rows=rows), call(backend, arguments)
    if backend == "native":
        assert torch.equal(out, whole)
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-4)


@needs_extension
@pytest.mark.parametrize("approximate", ["none", "quick"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_computes_tokens_as_it_does_among_all(dtype, approximate):
    x, grid, _ = arguments = make(
        batch=3, grid=(12, 15), channels=40, heads=2, class_tokens=1, dtype=dtype, approximate=approximate
    )
    rows = some_rows(x, grid, 77)
    expected = torch.where(is_computed(x, rows), call("native", arguments), x)
    assert torch.equal(call("native", arguments, rows=rows), expected)


@every_backend
def test_an_image_without_rows_stays_as_it_is(backend):
    x, grid, _ = arguments = make(batch=3, class_tokens=1)
    rows = some_rows(x, grid, 5)
    rows[2] = -1
    out = call(backend, arguments, rows=rows)
    assert torch.equal(out[2], x[2])
    torch.testing.assert_close(out, reference.transformer_block(*arguments, rows=rows))


@every_backend
def test_other_rows_of_the_same_shape_are_other_tokens(backend):
    x, grid, _ = arguments = make(class_tokens=1)
    for seed in range(3):
        rows = some_rows(x, grid, 6, seed)
        out = call(backend, arguments, rows=rows)
        torch.testing.assert_close(out, reference.transformer_block(*arguments, rows=rows))


@needs_extension
def test_batches_larger_than_what_is_held_between_the_steps():
    x, grid, block = arguments = make(batch=320, grid=(20, 20), class_tokens=1, channels=16, heads=2)
    rows = some_rows(x, grid, 300)
    out, received = call("native", arguments, rows=rows, scores="cls")
    for images in (slice(0, 40), slice(280, 320)):
        alone = call("native", (x[images], grid, block), rows=rows[images], scores="cls")
        assert torch.equal(alone[0], out[images])
        assert torch.equal(alone[1], received[images])


@needs_extension
def test_threads_change_nothing():
    x, grid, _ = arguments = make(batch=3, grid=(11, 12), class_tokens=1)
    rows, before, outs = some_rows(x, grid, 70), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outs.append(call("native", arguments, rows=rows, scores="avg"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


INSTRUCTION_SETS = """
import torch
from tests.cvt_kernels.ops.transformer_block.test_rows import check, make, some_rows
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    arguments = make(grid=(5, 8), channels=40, heads=2, width=72, class_tokens=1, dtype=dtype)
    for scores in ("cls", "avg"):
        check("native", arguments, some_rows(*arguments[:2], 23), scores)
"""


@needs_extension
@every_instruction_set
@pytest.mark.slow
def test_instruction_sets(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


# Quantized layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["composed", *(() if not_built() else ("native",))])
@pytest.mark.parametrize(("which", "scale"), [(range(6), None), ((0, 3, 5), 0.05), ((1, 4), None)], ids=str)
def test_quantized_layers(backend, which, scale):
    x, grid, _ = arguments = with_quantized(make(batch=3, class_tokens=1, channels=48), which, scale)
    rows = some_rows(x, grid, 12)
    out, received = call(backend, arguments, rows=rows, scores="cls")
    expected, same_received = reference.transformer_block(*arguments, rows=rows, scores="cls")
    assert torch.equal(torch.where(is_computed(x, rows), x, out), x)
    assert decibels(expected - x, out - x) > 55
    torch.testing.assert_close(received, same_received, rtol=0, atol=0.02)
    if backend == "native":
        assert torch.equal(out, torch.where(is_computed(x, rows), call(backend, arguments), x))


# Scores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("pool", ["cls", "avg"])
def test_scores_are_attention_maps(pool, with_rows):
    x, grid, block = arguments = make(class_tokens=1, batch=3)
    rows = some_rows(x, grid, 9) if with_rows else torch.arange(21).expand(3, -1)
    y = reference.layer_norm(x, *block.norm1[:2], eps=block.norm1.eps)
    projected = reference.conv_projection(y, grid, block.convs, training=False)
    q, k, _ = (
        reference.linear(tokens, *layer).unflatten(2, (3, -1))
        for tokens, layer in zip(projected, block.linears, strict=True)
    )
    for image, of_image in enumerate(rows):
        kept = of_image[of_image > 0]
        query = (
            q[image : image + 1, :1] if pool == "cls" else q[image : image + 1, kept].mean(1, keepdim=True)
        )
        expected = ck.attention_map(query, k[image : image + 1]).probabilities[0, :, 0].sum(0)
        for backend in ("reference", *(() if not_built() else ("native",))):
            _, received = call(backend, arguments, rows=rows if with_rows else None, scores=pool)
            torch.testing.assert_close(received[image], expected, rtol=1e-4, atol=1e-5)


def test_tokens_get_what_their_keys_receive():
    received = torch.tensor([[9.0, 1, 2, 3, 4]])
    scores = token_selection.scores_of_tokens(received, (3, 3), 2)
    assert scores.shape == (1, 9)
    assert scores.sum() == pytest.approx(10.0)
    assert scores[0, [0, 2, 6, 8]].argsort().tolist() == [0, 1, 2, 3]
    assert scores[0, 4] == pytest.approx(float(scores[0, [1, 3, 5, 7]].mean()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(token_selection.scores_of_tokens(received, (3, 3), 2), scores)


# Elsewhere ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_gradients(backend):
    x, grid, block = make(batch=2, grid=(2, 2), channels=4, heads=2, class_tokens=1, dtype=torch.float64)
    rows = torch.tensor([[0, 2, 3], [0, 4, -1]])
    leaves = [x, block.linears[0].weight, block.linears[1].weight, block.fc1.bias, block.fc2.weight]
    for leaf in leaves:
        leaf.requires_grad_()

    def tokens(*_):
        out, scores = ck.transformer_block(x, grid, block, rows=rows, scores="cls")
        assert not scores.requires_grad
        return out

    with ck.use_backend(backend, "reference"):
        assert gradcheck(tokens, leaves, fast_mode=True)


def test_compiled():
    torch.compiler.reset()
    x, grid, _ = arguments = make(class_tokens=1)
    rows = some_rows(x, grid, 7)
    compiled = torch.compile(ck.transformer_block, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        out, received = compiled(*arguments, rows=rows, scores="cls")
    expected = reference.transformer_block(*arguments, rows=rows, scores="cls")
    torch.testing.assert_close((out, received), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_recorded():
    x, grid, block = make(class_tokens=1)
    rows = some_rows(x, grid, 7)
    with torch.no_grad():
        traced = torch.jit.trace(
            lambda x, rows: ck.transformer_block(x, grid, block, rows=rows, scores="avg"), (x, rows)
        )
        others = torch.randn_like(x), some_rows(x, grid, 7, seed=1)
        expected = reference.transformer_block(others[0], grid, block, rows=others[1], scores="avg")
        torch.testing.assert_close(traced(*others), expected)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "onednn"])  # which serves none
def test_an_empty_batch(backend):
    x, grid, block = make()
    out, received = call(
        backend, (x[:0], grid, block), rows=torch.zeros(0, 3, dtype=torch.int64), scores="avg"
    )
    assert out.shape == (0, *x.shape[1:])
    assert received.shape == (0, 6)


def test_under_autocast():
    x, grid, _ = arguments = make(class_tokens=1)
    rows = some_rows(x, grid, 7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, received = ck.transformer_block(*arguments, rows=rows, scores="cls")
    expected = reference.transformer_block(*arguments, rows=rows, scores="cls")
    torch.testing.assert_close((out.float(), received), expected, atol=0.1, rtol=0.1)


# Proofs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inplace", "scores"), [(False, "avg"), (True, "cls"), (True, None)])
def test_every_backend_passes_its_proof(inplace, scores):
    x, grid, block = make(class_tokens=1)
    x[:] = 1.0  # which the proof replaces by random numbers, and not the rows
    rows, given = some_rows(x, grid, 9), x.clone()
    with torch.no_grad(), proofs.undisturbed(x.device):
        proof = dispatch.proof_of(
            "transformer_block", x, grid, block, rows=rows, scores=scores, inplace=inplace
        )
        standard = proofs.Standard.of(proof.reference, proof.sample)
        trials = {name: proofs.check(function, standard) for name, function in proof.candidates.items()}
        timed = proofs.time_in_turns(proof.candidates, proof.timed, trials)
    assert len(standard.same.outputs) == (1 if scores is None else 2)
    assert {name: trial.flaw for name, trial in timed.items()} == dict.fromkeys(BACKENDS)
    assert torch.equal(x, given)


def test_proofs_fail_a_kernel_that_computes_all_tokens():
    x, grid, block = make(class_tokens=1)
    with torch.no_grad(), proofs.undisturbed(x.device):
        proof = dispatch.proof_of("transformer_block", x, grid, block, rows=some_rows(x, grid, 9))
        standard = proofs.Standard.of(proof.reference, proof.sample)
        trial = proofs.check(lambda call: proof.reference(call._replace(rows=None)), standard)
    assert trial.flaw.startswith("wrong")


def test_kinds_of_calls():
    x, grid, _ = arguments = make(class_tokens=1)
    calls = [{}, *({"rows": some_rows(x, grid, kept)} for kept in (4, 7, 8, 17)), {"scores": "cls"}]
    calls.append({"rows": some_rows(x, grid, 8), "scores": "avg"})
    questions = [dispatch.question("transformer_block", *arguments, **each) for each in calls]
    assert questions[1] == questions[2]
    assert len(set(questions)) == len(calls) - 1
    assert questions[1] == questions[0] + ", 4+ tokens computed"
    assert questions[-1] == questions[0] + ", 8+ tokens computed, with scores of avg"


# What it refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rows": [[0]]}, TypeError, "rows: got list, expected a tensor"),
        ({"rows": torch.zeros(2, 3)}, TypeError, "rows: got dtype float32, expected int64"),
        ({"rows": torch.zeros(3, dtype=torch.int64)}, ValueError, r"rows: got shape \(3,\), expected 2 dim"),
        (
            {"rows": torch.zeros(1, 3, dtype=torch.int64)},
            ValueError,
            r"rows: got shape \(1, 3\), expected \(2",
        ),
        (
            {"rows": torch.zeros(2, 0, dtype=torch.int64)},
            ValueError,
            r"rows: got shape \(2, 0\), expected \(2",
        ),
        ({"rows": torch.arange(21).expand(2, 21) - 1}, ValueError, r"expected \(2, 1 to 20\)"),
        ({"rows": torch.zeros(2, 3, dtype=torch.int64, device="meta")}, ValueError, "rows: is on meta"),
        ({"scores": "max"}, ValueError, "scores: got 'max', expected 'cls', 'avg' or None"),
        ({"scores": "cls"}, ValueError, "scores: got 'cls' for tokens without a class token"),
    ],
)
def test_bad_arguments(settings, error, message):
    with pytest.raises(error, match=message), torch.no_grad():
        ck.transformer_block(*make(), **settings)


@needs_extension
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1, 21], [0, 1, 2]], "rows: got 21, expected indices of 21 tokens, or -1"),
        ([[0, 1, 2], [0, 1, -2]], "rows: got -2"),
        ([[0, 1, 2], [0, 2, 2]], "rows: got 2, expected those of an image ascending"),
        ([[0, 3, 2], [0, 1, 2]], "rows: got 2, expected those of an image ascending"),
        ([[0, -1, 2], [0, 1, 2]], "rows: got 2, expected those of an image ascending, then -1"),
        ([[0, 1, 2], [1, 2, 3]], "rows: got 1, expected the class token of each image"),
    ],
)
def test_native_refuses_wrong_rows_before_it_writes(rows, message, monkeypatch):
    monkeypatch.setattr(checks, "check_row_values", lambda *args, **options: None)  # as under torch.compile
    x, grid, block = make(class_tokens=1)
    stream = x.clone()
    with pytest.raises(RuntimeError, match=message):
        call("native", (stream, grid, block), rows=torch.tensor(rows), scores="cls", inplace=True)
    assert torch.equal(stream, x)


@pytest.mark.parametrize("backend", ["reference", "composed", "native"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1, 21], [0, 1, 2]], "rows: got 21, expected the tokens 0 to 20, or -1"),
        ([[0, 1, 2], [0, 1, -2]], "rows: do not ascend"),
        ([[0, 1, 2], [0, 2, 2]], "rows: do not ascend"),
        ([[0, 3, 2], [0, 1, 2]], "rows: do not ascend"),
        ([[0, -1, 2], [0, 1, 2]], "rows: do not ascend"),
        ([[0, 1, 2], [1, 2, 3]], "rows: begin with another token, expected the class token"),
    ],
)
def test_every_backend_refuses_wrong_rows(backend, rows, message):
    """If some backends did not, those that do would lose their proof for good."""
    with pytest.raises(ValueError, match=message):
        call(backend, make(class_tokens=1), rows=torch.tensor(rows), scores="cls")
