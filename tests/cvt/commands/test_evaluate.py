"""Figures of an evaluation, against scikit-learn's; costs, against the paper's."""

import json
import math

import pytest
import torch
from PIL import Image
from sklearn import metrics
from sklearn.datasets import load_digits
from torch import nn

import cvt_kernels as ck
from cvt import PRESETS, CvTConfig, create_model
from cvt import commands as cli
from cvt.checkpoints import ModelCard
from cvt.commands.evaluate import Cost, Evaluation, as_json, cost, evaluate, report
from cvt.factory import randomize
from cvt.images import preprocess
from cvt.training.recipe import MODELS
from tests.checks import bad

SMALL = CvTConfig(embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 2), num_classes=10)


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
    for sizes in ((20,), (8, 8, 4), (1,) * 20, (19, 1)):
        found = evaluate(Table(logits), batches(labels, *sizes))
        assert found.images == 20
        assert found.top1 == metrics.accuracy_score(labels, probabilities.argmax(-1))
        top5 = (
            1.0
            if classes < 5
            else metrics.top_k_accuracy_score(labels, probabilities, k=5, labels=everything)
        )
        assert found.top5 == top5
        assert found.loss == pytest.approx(
            metrics.log_loss(labels, probabilities, labels=everything), rel=1e-6
        )
        confusion = metrics.confusion_matrix(labels, probabilities.argmax(-1), labels=everything)
        assert found.confusion.tolist() == confusion.tolist()
        assert math.isnan(found.per_class[1])
        right = metrics.recall_score(labels, probabilities.argmax(-1), labels=[0, 2], average=None)
        assert found.per_class[[0, 2]].tolist() == pytest.approx(right.tolist())


def test_the_model_is_left_in_its_modes():
    model = create_model(SMALL).train()
    model.stage0.eval()
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    labelled = [(torch.randn(3, 3, 32, 32), torch.tensor([1, 2, 3]))]
    figures = [evaluate(model, labelled) for _ in range(2)]
    assert figures[0].loss == figures[1].loss  # no stochastic depth
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert figures[0].images_per_second > 0
    assert figures[0].peak_memory > 10 * 2**20
    with pytest.raises(ValueError, match="label 10"):
        evaluate(model, [(torch.randn(1, 3, 32, 32), torch.tensor([10]))])
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, seen = create_model(SMALL), []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    labelled = [(torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 4]))]
    exact, rounded = (evaluate(model, labelled, autocast=choice) for choice in (None, dtype))
    assert seen == [torch.float32, dtype]
    assert rounded.loss == pytest.approx(exact.loss, rel=1e-2)


def test_bad_batches():
    table = Table(torch.tensor([[0.0, 1.0], [0.0, math.nan], [math.inf, 0.0]]))

    def fails(images, labels):
        with pytest.raises(ValueError, match=r"^batches") as caught:
            evaluate(
                table, [(torch.tensor([0]), torch.tensor([0])), (torch.tensor(images), torch.tensor(labels))]
            )
        return str(caught.value)

    assert fails([0, 0], [0, 2]) == "batches[1]: got label 2, expected 0 to 1, the model's classes"
    assert "got label -1" in fails([0], [-1])
    assert fails([1], [0]) == fails([2], [0]) == "batches[1]: the model gives logits that are not finite"
    assert "labels of shape (1,) and dtype torch.int64, expected (2,)" in fails([0, 0], [0])
    assert "dtype torch.float32" in fails([0], [0.0])
    assert "logits of shape (1, 1, 2), expected (1, classes)" in fails([[0]], [0])
    with pytest.raises(ValueError, match="got no images"):
        evaluate(table, [])


# Costs ----------------------------------------------------------------------------------------------------


def multiply_adds(config, size):
    """The formula, stage by stage, for square images that every stride divides."""
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
    found = cost(PRESETS[name], size)
    assert found.multiply_adds == multiply_adds(PRESETS[name], size)
    assert found.multiply_adds / 1e9 == pytest.approx(paper, rel=tolerance)
    assert round(found.parameters / 1e6) == millions


def test_the_count_does_not_depend_on_the_backend():
    expected = cost(SMALL, 32)
    assert expected.multiply_adds == multiply_adds(SMALL, 32)
    with ck.use_backend("triton"):  # which could serve nothing here
        assert cost(SMALL, 32) == expected
    with pytest.raises(ValueError, match="pixels are too few"):
        cost(PRESETS["cvt_13"], 2)


# Output ---------------------------------------------------------------------------------------------------


def test_report_and_json():
    confusion = torch.tensor([[3, 0, 1], [0, 0, 0], [0, 0, 4]])
    figures = Evaluation(0.875, 1.0, 0.25, confusion, 12.34, 2**20), Cost(1500000, 2340000000)
    assert report(*figures, ["cat", "dog", "weasel"]).splitlines() == [
        "images               8",
        "top-1           87.50%",
        "top-5          100.00%",
        "loss            0.2500",
        "parameters      1.50 M",
        "multiply-adds   2.34 G",
        "images/s          12.3",
        "peak memory      1 MiB",
        "",
        "class   images    right  most often taken for",
        "cat          4   75.00%  weasel (1)",
        "weasel       4  100.00%",
    ]
    assert "class 0       4   75.00%  class 2 (1)" in report(*figures)
    content = json.loads(json.dumps(as_json(*figures), allow_nan=False))
    assert content["per_class"] == [0.75, None, 1.0]
    assert content["confusion"] == confusion.tolist()
    assert (content["images"], content["multiply_adds"], content["labels"]) == (8, 2340000000, None)
    assert len(report(*figures).splitlines()) == 12
    many = Evaluation(1.0, 1.0, 0.0, torch.eye(30, dtype=torch.int64), 1.0, None)
    assert len(report(many, figures[1]).splitlines()) == 20
    assert "unknown" in report(many, figures[1])


# The command ----------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """A checkpoint as ``cvt train`` writes it, of a model for scikit-learn's digits, and the model."""
    model = create_model(MODELS["cvt_nano"], num_classes=10).eval()
    randomize(model)
    card = ModelCard(model.config, [str(i) for i in range(10)], 16, 1.0)
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, tmp_path / "digits.pth")
    return tmp_path / "digits.pth", model


def test_command_on_digits(capsys, trained, tmp_path):
    path, model = trained
    options = ["--data", "digits", "--checkpoint", str(path)]
    outputs = []
    for batch in ("50", "360"):
        json_file = tmp_path / f"{batch}.json"
        assert cli.main(["evaluate", *options, "--batch-size", batch, "--json", str(json_file)]) == 0
        outputs.append((capsys.readouterr(), json.loads(json_file.read_text())))
    digits = load_digits()
    held_out = [i for i in range(len(digits.target)) if i % 5 == 0]
    pictures = [Image.fromarray((digits.images[i] * 255 / 16).round().astype("uint8")) for i in held_out]
    images = torch.stack(
        [preprocess(picture.convert("RGB"), 16, upscale=True, crop_fraction=1.0) for picture in pictures]
    )
    with torch.no_grad():
        logits = model(images)
    labels = torch.from_numpy(digits.target[held_out])
    for (out, err), content in outputs:
        assert err == ""
        assert content["images"] == 360
        assert content["top1"] == metrics.accuracy_score(labels, logits.argmax(-1))
        assert content["loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
        assert content["confusion"] == metrics.confusion_matrix(labels, logits.argmax(-1)).tolist()
        assert content["labels"] == [str(i) for i in range(10)]
        assert f"{content['top1']:.2%}" in out
        assert "digits.pth on digits, 16×16 pixels, fp32 on c" in out
    assert outputs[0][1]["top5"] == outputs[1][1]["top5"]


def test_command_on_a_folder_with_a_file_that_is_no_image(capsys, trained, tmp_path):
    path, _ = trained
    for i in range(10):
        folder = tmp_path / "data" / "val" / str(i)
        folder.mkdir(parents=True)
        Image.new("RGB", (20, 30), (25 * i, 0, 0)).save(folder / "a.png")
    (tmp_path / "data" / "val" / "3" / "b.png").write_text("hello")
    options = ["evaluate", "--data", str(tmp_path / "data"), "--checkpoint", str(path)]
    assert "b.png: is not a readable image" in bad(capsys, cli.main, *options)
    assert cli.main([*options, "--corrupt", "skip", "--precision", "bf16"]) == 0
    out, err = capsys.readouterr()
    assert ["images", "10"] in [line.split() for line in out.splitlines()]
    assert err.startswith("cvt evaluate: skipped: ")
    assert err.count("\n") == 1


def test_command_bad_input(capsys, trained, tmp_path):
    path, model = trained

    def fails(*arguments, data="digits", checkpoint=path):
        return bad(capsys, cli.main, "evaluate", "--data", data, "--checkpoint", checkpoint, *arguments)

    assert "/none/val does not exist" in fails(data=tmp_path / "none")
    assert "none.pth does not exist" in fails(checkpoint=tmp_path / "none.pth")
    assert "nothing: cannot be written to: No such file" in fails("--json", tmp_path / "nothing" / "a.json")
    assert "is a directory, expected a file" in fails("--json", tmp_path)
    assert "invalid choice: 'fp8'" in fails("--precision", "fp8")
    for i in range(3):
        (tmp_path / "three" / "val" / f"class {i}").mkdir(parents=True)
        Image.new("RGB", (20, 30)).save(tmp_path / "three" / "val" / f"class {i}" / "a.png")
    assert "three: has 3 classes, the model 10" in fails(data=tmp_path / "three")
    card = ModelCard(model.config, [f"digit {i}" for i in range(10)], 16, 1.0)
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, tmp_path / "named.pth")
    assert "its classes have other names than those of" in fails(checkpoint=tmp_path / "named.pth")
    model.norm.weight.data.fill_(math.nan)
    card = ModelCard(model.config, [str(i) for i in range(10)], 16, 1.0)
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, path)
    before = sorted(tmp_path.iterdir())
    assert "batches[0]: the model gives logits that are not finite" in fails("--json", tmp_path / "a.json")
    assert sorted(tmp_path.iterdir()) == before
