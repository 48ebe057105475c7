"""Tests of ``cvt bench --model`` for models of transformers besides CvT."""

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import hub
from cvt.tools import commands as cli
from cvt.tools.commands.bench import contenders, models, workers
from cvt.tools.commands.bench import results as result_files
from tests.checks import bad
from tests.cvt.tools.commands.bench.test_bench import make_quick
from tests.upstream import KERNELS_FIRST

TINY = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 2, 1, 1],
    "mlp_ratios": [2, 2, 2, 2],
    "num_attention_heads": [1, 2, 3, 4],
}
SMALL_HEAD = {"SegformerForSemanticSegmentation": {"decoder_hidden_size": 16, "num_labels": 7}}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Makes the models tiny, and their measurement quick."""
    for name, pyramid in models.PYRAMIDS.items():
        sizes = {**pyramid.sizes, **TINY, **SMALL_HEAD.get(pyramid.model_class, {})}
        monkeypatch.setitem(models.PYRAMIDS, name, pyramid._replace(sizes=sizes))
    make_quick(monkeypatch)


@pytest.fixture
def accelerated(monkeypatch):
    """Lets ``accelerate`` leave models as they are, and freeze none; the fixture lists its calls."""
    calls = []

    def accelerate(model, *, freeze):
        calls.append((type(model).__name__, freeze))
        if freeze:
            raise ValueError("model: has nothing to freeze")

    monkeypatch.setattr(contenders, "accelerate", accelerate)
    return calls


def measured(name, image_size=64, **options):
    return result_files.run(model=name, image_size=image_size, batch_sizes=(2,), rounds=1, **options)


def keys_of(results):
    (batch,) = results["batches"]
    return [row["contender"] for row in batch["rows"]]


# What is measured -----------------------------------------------------------------------------------------


def test_accelerated_models_are_measured():
    """The images are of an odd size, and the kernels ours."""
    with ck.use_backend(*KERNELS_FIRST):
        results = measured("segformer_b0", image_size=70)
    (batch,) = results["batches"]
    hf = batch["rows"][0]
    assert keys_of(results) == ["hf", "accelerate", "accelerate-frozen"]
    assert results["contenders"]["hf"]["about"] == "Hugging Face's SegformerForSemanticSegmentation"
    # A map of classes for a fourth of the pixels each way; every pixel has its top 5 of 7 classes.
    assert hf["of"] == 2 * 18 * 18 * 5
    assert "70×70" in result_files.text(results)


def test_a_frozen_model_is_left_out_with_the_reason(accelerated):
    results = measured("pvt_v2_b2_linear", peers=("hf", "eager", "cvt-compile"))
    assert keys_of(results) == ["hf", "accelerate"]
    assert accelerated == [("PvtV2ForImageClassification", freeze) for freeze in (False, True)]
    notes = {key: about["note"] for key, about in results["contenders"].items()}
    none = "cvt has no such model"
    reasons = {"eager": none, "accelerate-frozen": "model: has nothing to freeze", "cvt-compile": none}
    assert notes == {"hf": None, "accelerate": None} | reasons
    assert "not measured: model: has nothing to freeze" in result_files.text(results)


@pytest.mark.parametrize("name", ["segformer_b1", pytest.param("glpn", marks=pytest.mark.rest)])
@pytest.mark.usefixtures("accelerated")
def test_training_step(name):
    results = measured(name, train=True)
    assert keys_of(results) == ["hf", "accelerate"]
    for row in results["batches"][0]["rows"]:
        assert row["gradient_error"] < 1e-5
    text = result_files.text(results)
    assert "Δ of gradients' norms" in text
    # A depth has no classes to agree on.
    assert ("max |Δ depth|" in text, "top-5" in text) == ((True, False) if name == "glpn" else (False, True))


def test_the_loss_has_a_class_for_every_pixel():
    model = nn.Conv2d(3, 4, 1)
    images = torch.randn(2, 3, 5, 6)
    logits = contenders.training_step(model, images, torch.float32)
    found = model.weight.grad.clone()
    torch.testing.assert_close(logits, model(images))
    labels = torch.arange(2 * 5 * 6).remainder(4).view(2, 5, 6)
    loss = model(images).log_softmax(1).gather(1, labels[:, None]).mean().neg()
    torch.testing.assert_close(found, *torch.autograd.grad(loss, model.weight))


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_a_wrong_model_is_never_timed(train, monkeypatch):
    def accelerate(model, *, freeze):
        with torch.no_grad():
            next(p for p in model.parameters() if p.ndim == 4).mul_(1.001)

    monkeypatch.setattr(contenders, "accelerate", accelerate)
    monkeypatch.setattr(workers.Runner, "turn", lambda *arguments: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"accelerate: error \S+ against float64, .* nothing was timed"):
        measured("glpn", train=train)


# Models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions", "multiply_adds"),
    [
        ("segformer_b0", 3.8, 8.4e9),
        ("pvt_tiny", 13.2, 1.9e9),
        ("pvt_v2_b0", 3.7, 0.57e9),
        ("vit_s16", 22.1, 4.6e9),
        ("vit_b16", 86.6, 17.6e9),
        ("clip_b32", 87.8, 4.4e9),
    ],
)
def test_sizes_are_the_published_ones(name, millions, multiply_adds, monkeypatch):
    monkeypatch.undo()  # the sizes themselves
    size = models.PYRAMIDS[name].image_size
    model = models.build_pyramid(name, None, size)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
    assert models.operations(name, model, size) == pytest.approx(2 * multiply_adds, rel=0.03)


def test_weights_come_back(tmp_path, monkeypatch):
    subject = models.build_subject("segformer_b0", None, 64)
    assert subject.weights == "random weights (seed 0)"
    subject.hf.save_pretrained(tmp_path)
    again = models.build_subject("segformer_b0", str(tmp_path), 64)
    assert again.weights == str(tmp_path)
    assert again.hf.config.drop_path_rate == 0
    for (name, a), b in zip(subject.hf.state_dict().items(), again.hf.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    monkeypatch.setattr(hub, "fetch", lambda model: {"owner/name": tmp_path}[model.name])
    assert models.build_subject("segformer_b0", "owner/name", 64).weights == "owner/name"


def test_weights_of_other_models(tmp_path, capsys):
    models.build_subject("segformer_b0", None, 64).hf.save_pretrained(tmp_path)

    def fails(*model):
        return bad(capsys, cli.main, "bench", "--checkpoint", tmp_path, *model)

    assert f"{tmp_path}: is of segformer; give --model, one of segformer_b0, segformer_b1, " in fails()
    assert f"{tmp_path} is of segformer, expected a model of pvt" in fails("--model", "pvt_tiny")
    models.PYRAMIDS["segformer_b1"].sizes["hidden_sizes"] = [16, 16, 24, 32]
    other = fails("--model", "segformer_b1")
    assert "has hidden_sizes [8, 16, 24, 32], expected [16, 16, 24, 32] as segformer_b1 has" in other


def test_a_model_that_this_transformers_lacks(capsys, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "PvtV2ForImageClassification", None)
    line = bad(capsys, cli.main, "bench", "--model", "pvt_v2_b0")
    assert "model: pvt_v2_b0 is not in transformers" in line
