"""Frozen stages that drop tokens, on a CPU: they choose the same tokens and compute the same as the model."""

import copy
import dataclasses

import pytest
import torch

import cvt.model
import cvt_kernels as ck
from cvt import create_model
from cvt.factory import randomize
from cvt_kernels.models import families, stages
from cvt_kernels.models import served as served_module
from cvt_kernels.ops import token_selection
from cvt_kernels.ops.linear_int8.modules import LinearInt8
from tests.checks import assert_accurate, not_built
from tests.cvt.models import two_stages
from tests.cvt_kernels.models.served import decibels, frozen, stages_of
from tests.upstream import images, in_float64

BACKENDS = [("reference",), ("composed", "reference"), *([] if not_built() else [("cpu", "reference")])]
POOLS = [("cls", True), ("avg", True), ("avg", False)]


pytestmark = pytest.mark.usefixtures("without_gradients")


class Chosen:
    """The tokens that stages choose, frozen or not."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.rows = monkeypatch, []
        monkeypatch.setattr(stages, "select_tokens", self.note)
        monkeypatch.setattr(cvt.model, "select_tokens", self.note)

    def note(self, scores, *args, **settings):
        rows = token_selection.select_tokens(scores, *args, **settings)
        self.rows.append(rows)
        return rows

    def repeat(self, rows):
        """Lets models choose these rows, whatever their scores: near ties fall either way."""
        given = iter(rows)
        self.monkeypatch.setattr(cvt.model, "select_tokens", lambda *args, **settings: next(given))


@pytest.fixture
def chosen(monkeypatch):
    return Chosen(monkeypatch)


def make(keep=0.6, pool="cls", class_token=True, *, bounds=(0.3, 0.9), layer_scale=None, depth=4):
    config = dataclasses.replace(
        two_stages(), depths=(1, depth), cls_token=(False, class_token), pool=pool, token_keep=keep,
        token_keep_bounds=bounds, layer_scale=layer_scale, drop_path_rate=0.0,
    )  # fmt: skip
    model = create_model(config)
    randomize(model)
    return model.eval()


def run(model, x, chosen):
    """Returns the logits and the rows that were chosen on the way, which must be of so many drops."""
    before = len(chosen.rows)
    with ck.use_backend("reference"):
        out = model(x)
    rows = chosen.rows[before:]
    assert len(rows) == 3
    return out, rows


@pytest.mark.parametrize("backends", BACKENDS, ids=lambda backends: backends[0])
@pytest.mark.parametrize(("pool", "class_token"), POOLS)
@pytest.mark.parametrize(("keep", "batch"), [(0.6, 3), ("entropy", 1), ("entropy", 3)])
def test_results_are_as_accurate(keep, batch, pool, class_token, backends, chosen, served):
    own = make(keep, pool, class_token)
    x = images(batch, 28, 36)
    with ck.use_backend(*backends):
        out = frozen(own)(x)
    assert len(served) == 2
    assert len(chosen.rows) == 3
    kept = [rows.shape[1] for rows in chosen.rows]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3
    if batch == 1:
        assert all((rows >= 0).all() for rows in chosen.rows)
    rows = chosen.rows[:]
    chosen.repeat(rows)
    with ck.use_backend("reference"):
        same = own(x)
    chosen.repeat(rows)
    exact = in_float64(copy.deepcopy(own))(x.double())
    assert_accurate(out, same, exact, floor=4)


def test_the_same_tokens_are_chosen(chosen):
    """Among 5×5 tokens no two have the same keys, so that the scores are well apart."""
    for keep in (0.6, "entropy"):
        own = make(keep)
        x = images(2, 20, 20)
        _, expected = run(own, x, chosen)
        _, rows = run(frozen(own), x, chosen)
        assert all(map(torch.equal, rows, expected))


def test_budgets_differ_within_a_batch(chosen):
    own = make("entropy", bounds=(0.1, 1.0))
    own.stage1.blocks[0].attn.proj_q.weight.mul_(20)  # attention that is not the same everywhere
    x = images(4, 36, 36)
    x[1:] *= torch.tensor([0.05, 3.0, 0.5]).view(3, 1, 1, 1)
    out, rows = run(frozen(own), x, chosen)
    assert any((each == -1).any() for each in rows)
    # Alone, an image has a budget of its own, and no row that is -1; the rest is the same.
    for i, image in enumerate(x):
        alone, of_image = run(frozen(own), image[None], chosen)
        assert all(torch.equal(a[0], b[i][b[i] >= 0]) for a, b in zip(of_image, rows, strict=True))
        torch.testing.assert_close(alone[0], out[i], rtol=1e-4, atol=1e-5)


def test_keeping_all_is_the_same_as_no_pruning(chosen, served):
    own = make(1.0)
    x = images(2, 20, 20)
    expected = frozen(own)(x)
    for block in own.stage1.blocks:
        block.token_keep = 1
    assert torch.equal(frozen(own)(x), expected)
    assert not chosen.rows
    assert len(served) == 4


@pytest.mark.parametrize("backends", BACKENDS[1:], ids=lambda backends: backends[0])
def test_quantized_layers(backends, chosen, served):
    own = make("entropy")
    for stage in stages_of(own):
        for path, layer in list(stage.named_modules()):
            if isinstance(layer, torch.nn.Linear):
                stage.set_submodule(path, LinearInt8.from_float(layer).eval())
    x = images(3, 28, 36)
    with ck.use_backend(*backends):
        out = frozen(own)(x)
    assert len(served) == 2
    chosen.repeat(chosen.rows[:])
    with ck.use_backend("reference"):
        assert decibels(own(x), out) > 25


# Where it is served ---------------------------------------------------------------------------------------


def test_elsewhere_the_blocks_run():
    own = make().to("meta")
    assert served_module.why_not_freezable(own.stage1, families.SERVED["cvt Stage"]) == (
        "drops tokens, which frozen stages do on a CPU only"
    )
    assert served_module.why_not_freezable(own.stage0, families.SERVED["cvt Stage"]) is None


def test_under_torch_compile_a_stage_is_one_operator(chosen, served):
    """Its budgets are exact there too, since the compiler does not see them."""
    torch.compiler.reset()
    fused, x = frozen(make("entropy", depth=2)), images(2, 20, 20)
    expected = fused(x)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)
    assert len(served) == 4
    assert torch.equal(*chosen.rows)
