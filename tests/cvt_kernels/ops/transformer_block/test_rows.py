"""transformer_block of some tokens: values, scores, and rows that are refused."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import checks, reference
from cvt_kernels.ops import token_selection
from tests.checks import not_built
from tests.cvt_kernels.ops.transformer_block.calls import (
    call,
    decibels,
    every_backend,
    far_from_ties,
    is_computed,
    make,
    some_rows,
    with_quantized,
)


@every_backend
def test_rows_of_all_tokens_are_the_whole_block(backend):
    x, *_ = arguments = make(class_tokens=1, batch=3)
    rows = torch.arange(x.shape[1]).expand(3, -1)  # strided, too
    out, whole = call(backend, arguments, rows=rows), call(backend, arguments)
    tolerance = 0 if backend == "cpu" else 1e-4
    torch.testing.assert_close(out, whole, rtol=tolerance, atol=tolerance)


@every_backend
def test_other_rows_of_the_same_shape_are_other_tokens(backend):
    x, grid, _ = arguments = make(class_tokens=1)
    for seed in range(3):
        rows = some_rows(x, grid, 6, seed)
        rows[1] = -1 if seed == 2 else rows[1]
        out = call(backend, arguments, rows=rows)
        torch.testing.assert_close(out, reference.transformer_block(*arguments, rows=rows))
    assert torch.equal(out[1], x[1])  # an image without rows


@pytest.mark.parametrize("backend", ["composed", *(() if not_built() else ("cpu",))])
@pytest.mark.parametrize("which", [range(6), (0, 3, 5), (1, 4)], ids=str)
@pytest.mark.parametrize("of_cvt", [True, False])
def test_quantized_layers(backend, which, of_cvt):
    def made():
        reduce = {} if of_cvt else {"ratio": 0}
        return with_quantized(make(batch=3, class_tokens=1, channels=48, **reduce), which)

    rows = some_rows(*made()[:2], 12)
    x, *_ = arguments = far_from_ties(made, rows=rows)
    out, expected = call(backend, arguments, rows=rows), reference.transformer_block(*arguments, rows=rows)
    assert torch.equal(torch.where(is_computed(x, rows), x, out), x)
    assert decibels(expected - x, out - x) > 55
    if of_cvt:
        settings = {"rows": rows, "scores": "cls"}
        out, received = call(backend, arguments, **settings)
        same_received = reference.transformer_block(*arguments, **settings)[1]
        torch.testing.assert_close(received, same_received, rtol=0, atol=0.02)
    if backend == "cpu":
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
        one, kept = slice(image, image + 1), of_image[of_image > 0]
        query = q[one, :1] if pool == "cls" else q[one, kept].mean(1, keepdim=True)
        expected = ck.attention_map(query, k[one]).probabilities[0, :, 0].sum(0)
        for backend in ("reference", *(() if not_built() else ("cpu",))):
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


#: Wrong rows, what every backend says of them, and what the kernel itself does.
WRONG_ROWS = [
    ([[0, 1, 21], [0, 1, 2]], "got 21, expected the tokens 0 to 20", "got 21, expected indices of 21 tokens"),
    ([[0, 1, 2], [0, 1, -2]], "do not ascend", "got -2"),
    ([[0, 1, 2], [0, 2, 2]], "do not ascend", "got 2, expected those of an image ascending"),
    ([[0, 3, 2], [0, 1, 2]], "do not ascend", "got 2, expected those of an image ascending"),
    ([[0, -1, 2], [0, 1, 2]], "do not ascend", "got 2, expected those of an image ascending, then -1"),
    ([[0, 1, 2], [1, 2, 3]], "begin with another token", "got 1, expected the class token of each image"),
]


@pytest.mark.parametrize("backend", ["reference", "composed", "cpu"])
@pytest.mark.parametrize(("rows", "message", "of_kernel"), WRONG_ROWS)
def test_every_backend_refuses_wrong_rows(backend, rows, message, of_kernel, monkeypatch):
    """If some backends did not, those that do would lose their tuning for good."""
    x, grid, block = make(class_tokens=1)
    settings = {"rows": torch.tensor(rows), "scores": "cls"}
    with pytest.raises(ValueError, match=f"rows: {message}"):
        call(backend, (x, grid, block), **settings)
    if backend == "cpu":  # which sees itself what torch.compile does not check, before it writes
        monkeypatch.setattr(checks, "check_row_values", lambda *args, **options: None)
        stream = x.clone()
        with pytest.raises(RuntimeError, match=f"rows: {of_kernel}"):
            call(backend, (stream, grid, block), **settings, inplace=True)
        assert torch.equal(stream, x)
