"""Figures of an evaluation, against scikit-learn's; costs, against the paper's."""

import math

import pytest
import torch
from sklearn import metrics
from torch import nn

import cvt_kernels as ck
from cvt import PRESETS, create_model
from cvt.tools.evaluation import cost, evaluate
from cvt_kernels.tuning import clock
from tests.cvt.models import SMALL


class Table(nn.Module):
    """A model whose logits of image i are row i of a table; images hold nothing but their number."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images):
        return self.logits[images.long()]


def batches(labels, *sizes):
    images = torch.arange(len(labels)).float()
    return list(zip(images.split(sizes), labels.split(sizes), strict=True))


@pytest.mark.parametrize("classes", [3, 7])
def test_figures_are_those_of_scikit_learn_however_the_images_are_batched(classes):
    logits, labels = torch.randn(20, classes), torch.randint(classes, (20,))
    labels[labels == 1] = 0  # nobody is of class 1
    probabilities, everything = logits.softmax(-1).numpy(), list(range(classes))
    best = probabilities.argmax(-1)
    top5 = metrics.top_k_accuracy_score(labels, probabilities, k=5, labels=everything) if classes > 5 else 1.0
    loss = metrics.log_loss(labels, probabilities, labels=everything)
    confusion = metrics.confusion_matrix(labels, best, labels=everything)
    right = metrics.recall_score(labels, best, labels=[0, 2], average=None)
    for sizes in ((20,), (8, 8, 4), (1,) * 20, (19, 1)):
        figures = evaluate(Table(logits), batches(labels, *sizes))
        assert figures.images == 20
        assert (figures.top1, figures.top5) == (metrics.accuracy_score(labels, best), top5)
        assert figures.loss == pytest.approx(loss, rel=1e-6)
        assert figures.confusion.tolist() == confusion.tolist()
        assert math.isnan(figures.per_class[1])
        assert figures.per_class[[0, 2]].tolist() == pytest.approx(right.tolist())


def test_the_model_is_left_in_its_modes():
    model = create_model(SMALL).train()
    model.stage0.eval()
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    labeled = [(torch.randn(3, 3, 32, 32), torch.tensor([1, 2, 3]))]
    figures = [evaluate(model, labeled) for _ in range(2)]
    assert figures[0].loss == figures[1].loss  # no stochastic depth
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert figures[0].images_per_second is None  # of one batch
    assert figures[0].peak_memory > 10 * 2**20
    with pytest.raises(ValueError, match="label 10"):
        evaluate(model, [(torch.randn(1, 3, 32, 32), torch.tensor([10]))])
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    ("sizes", "costs", "expected", "disturbed"),
    [
        ((4, 4, 4, 4, 4, 4, 2), (90, 2, 2, 3, 9, 2, 1), 4 / 2, False),  # the first tunes, one is disturbed
        ((2, 4, 4, 4, 4, 4), (1, 9, 1, 2, 3, 4), 4 / 2.5, True),
        ((4, 4, 4, 4, 2, 2), (9, 1, 3, 3, 1, 1), None, False),  # too few for a median
        ((4,), (1,), None, False),
    ],
)
def test_speed_is_a_median_after_a_batch_that_warms_up(sizes, costs, expected, disturbed, monkeypatch):
    moments = (moment for seconds in costs for moment in (0.0, float(seconds)))
    monkeypatch.setattr(clock, "now", lambda device: next(moments))
    monkeypatch.setattr(clock, "waited_seconds", lambda: 0.0)
    labels = torch.zeros(sum(sizes), dtype=torch.int64)
    figures = evaluate(Table(torch.zeros(sum(sizes), 2)), batches(labels, *sizes))
    assert figures.images_per_second == (None if expected is None else pytest.approx(expected))
    assert figures.is_disturbed == disturbed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, seen = create_model(SMALL), []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    labeled = [(torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 4]))]
    exact, rounded = (evaluate(model, labeled, autocast=choice) for choice in (None, dtype))
    assert seen == [torch.float32, dtype]
    assert rounded.loss == pytest.approx(exact.loss, rel=1e-2)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ([0, 0], [0, 2], "got label 2, expected 0 to 1"),
        ([0], [-1], "got label -1"),
        ([1], [0], "the model gives logits that are not finite"),
        ([2], [0], "the model gives logits that are not finite"),
        ([0, 0], [0], r"labels of shape \(1,\) and dtype torch.int64, expected \(2,\)"),
        ([0], [0.0], "dtype torch.float32"),
        (None, None, "got no images"),
    ],
)
def test_bad_batches(images, labels, message):
    table = Table(torch.tensor([[0.0, 1.0], [0.0, math.nan], [math.inf, 0.0]]))
    good, name = (torch.tensor([0]), torch.tensor([0])), r"batches\[1\]" if images else "batches"
    given = [] if images is None else [good, (torch.tensor(images), torch.tensor(labels))]
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        evaluate(table, given)


# Costs ----------------------------------------------------------------------------------------------------


def multiply_adds(config, size):
    """Computes the formula, stage by stage, for square images that every stride divides."""
    total, channels = 0, config.in_chans
    for stage in config.stages:
        size = (size + 2 * stage.patch_padding - stage.patch_size) // stage.patch_stride + 1
        dim, grid, key_grid = stage.embed_dim, size**2, (-(-size // stage.stride_kv)) ** 2
        queries, keys = grid + stage.cls_token, key_grid + stage.cls_token
        total += grid * dim * channels * stage.patch_size**2
        depthwise = dim * stage.kernel_size**2 * (grid + 2 * key_grid)
        linear = dim**2 * (2 * queries + 2 * keys) + 2 * stage.mlp_ratio * dim**2 * queries
        total += stage.depth * (depthwise + linear + 2 * queries * keys * dim)
        channels = dim
    return total + channels * config.num_classes


@pytest.mark.parametrize(
    ("name", "size", "millions", "paper", "tolerance"),
    [
        # The paper has one decimal and does not say what it counts besides products.
        ("cvt_13", 224, 20, 4.5, 0.015),
        ("cvt_21", 224, 32, 7.1, 0.012),
        ("cvt_13", 384, 20, 16.3, 0.003),
        ("cvt_21", 384, 32, 24.9, 0.003),
        ("cvt_w24", 384, 277, 193.2, 0.006),
    ],
)
def test_multiply_adds_are_those_of_the_paper(name, size, millions, paper, tolerance):
    costs = cost(PRESETS[name], size)
    assert costs.multiply_adds == multiply_adds(PRESETS[name], size)
    assert costs.multiply_adds / 1e9 == pytest.approx(paper, rel=tolerance)
    assert round(costs.parameters / 1e6) == millions


def test_the_count_does_not_depend_on_the_backend():
    expected = cost(SMALL, 32)
    assert expected.multiply_adds == multiply_adds(SMALL, 32)
    with ck.use_backend("triton"):  # which could serve nothing here
        assert cost(SMALL, 32) == expected
    with pytest.raises(ValueError, match="pixels are too few"):
        cost(PRESETS["cvt_13"], 2)
