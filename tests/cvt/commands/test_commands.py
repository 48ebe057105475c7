"""Both commands, as a person runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from cvt import commands as cvt_cli
from cvt import commands as kernels_cli
from cvt import create_model
from cvt.factory import randomize
from cvt.images import load_images, sample_photos
from tests.checks import bad


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """An official-looking CvT-13 checkpoint of 12 classes, and the model."""
    model = create_model("cvt_13", num_classes=12).eval()
    randomize(model)
    path = tmp_path_factory.mktemp("weights") / "CvT-13.pth"
    torch.save(model.state_dict(), path)
    return path, model


@pytest.fixture
def photos():
    return [str(path) for path in sample_photos()]


def classify(capsys, *arguments):
    code = cvt_cli.main(["classify", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_classify_prints_the_models_own_top_5(capsys, weights, photos, tmp_path):
    path, model = weights
    names = [f"thing {i}" for i in range(12)]
    (tmp_path / "labels.txt").write_text("\n".join(names))
    code, out, _ = classify(capsys, *photos, "--checkpoint", path, "--labels", tmp_path / "labels.txt")
    assert code == 0
    with torch.inference_mode():
        top = model(load_images(photos)).softmax(-1).topk(5)
    expected = []
    for photo, values, indices in zip(photos, top.values.tolist(), top.indices.tolist(), strict=True):
        expected += [photo, *(f"  {v:7.2%}  {names[i]}" for v, i in zip(values, indices, strict=True))]
    assert out.splitlines() == expected


def test_classify_without_labels_in_small_batches(capsys, weights, photos):
    path, _ = weights
    code, whole, _ = classify(capsys, *photos, "--checkpoint", path, "--device", "cpu")
    assert code == 0
    assert "%  class " in whole
    options = ("--batch-size", "1", "--top", "12", "--image-size", "224", "--model", "cvt_13")
    _, single, _ = classify(capsys, *photos, "--checkpoint", path, *options)
    assert len(single.splitlines()) == 2 * 13
    assert [line for line in single.splitlines() if line in whole.splitlines()][:3] == whole.splitlines()[:3]


def test_classify_takes_labels_and_activation_of_a_hugging_face_model(capsys, weights, photos, tmp_path):
    from cvt import save_huggingface

    model = create_model("cvt_13", checkpoint=weights[0], activation="gelu")
    save_huggingface(model, tmp_path, labels=[f"thing {i}" for i in range(12)])
    code, out, _ = classify(capsys, photos[0], "--checkpoint", tmp_path, "--activation", "gelu")
    assert code == 0
    assert out.count("%  thing ") == 5
    with torch.inference_mode():
        expected = model.eval()(load_images(photos[:1])).softmax(-1).max()
    assert f"{expected:7.2%}" in out


def test_classify_bad_input(capsys, weights, photos, tmp_path):
    path, _ = weights
    (tmp_path / "text.jpg").write_text("hello")
    jpeg = Path(photos[0]).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    Image.new("RGB", (300, 100)).save(tmp_path / "small.png")
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    torch.save({"fc.weight": torch.ones(2, 2)}, tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "cut.pth").write_bytes(path.read_bytes()[:100000])

    def fails(*arguments, checkpoint=path):
        return bad(capsys, cvt_cli.main, "classify", *arguments, "--checkpoint", checkpoint)

    assert "none.jpg does not exist" in fails(photos[0], tmp_path / "none.jpg")
    assert "text.jpg: is not a readable image" in fails(photos[0], tmp_path / "text.jpg")
    assert "cut.jpg: is not a readable image" in fails(tmp_path / "cut.jpg", photos[0])
    assert "small.png: is 300×100 pixels, smaller than the 224×224 crop" in fails(tmp_path / "small.png")
    assert "three.txt names 3 classes, expected 12" in fails(photos[0], "--labels", tmp_path / "three.txt")
    assert "labels: " in fails(photos[0], "--labels", tmp_path / "none.txt")
    assert "other.pth: is not a CvT of cvt_13" in fails(photos[0], checkpoint=tmp_path / "other.pth")
    assert "text.pth: is not a file of torch.save, or damaged; it begins with b'hello'" in fails(
        photos[0], checkpoint=tmp_path / "text.pth"
    )
    assert "cut.pth: is not a file of torch.save, or damaged" in fails(
        photos[0], checkpoint=tmp_path / "cut.pth"
    )
    assert "none.pth does not exist" in fails(photos[0], checkpoint=tmp_path / "none.pth")
    assert "does not fit this model" in fails(photos[0], "--model", "cvt_21")
    assert "it looks like cvt_13" in fails(photos[0], "--model", "cvt_21")
    assert "error: --device nonsense: " in fails(photos[0], "--device", "nonsense")
    assert "--top: got '0', expected a positive integer" in fails(photos[0], "--top", 0)
    assert "invalid choice: 'cvt_99'" in fails(photos[0], "--model", "cvt_99")
    assert "--device meta: computes nothing" in fails(photos[0], "--device", "meta")
    broken = {name: t / 0 if name == "norm.weight" else t for name, t in weights[1].state_dict().items()}
    torch.save(broken, tmp_path / "broken.pth")
    assert "probabilities that are not finite" in fails(photos[0], checkpoint=tmp_path / "broken.pth")
    if not torch.cuda.is_available():
        assert "--device cuda: " in fails(photos[0], "--device", "cuda")


def test_an_unavailable_backend_is_one_line(capsys, weights, photos, monkeypatch):
    monkeypatch.setattr("cvt_kernels.backends._requested", "triton")
    line = bad(capsys, cvt_cli.main, "classify", photos[0], "--checkpoint", weights[0])
    assert "error: layer_norm: backend 'triton' is unavailable: not implemented in this version" in line


def _tables(out):
    """Lines at which the tables of speed and of parity begin."""
    return [i for i, line in enumerate(out.splitlines()) if line.startswith(("batch", "parity"))]


def test_bench_compares_on_real_photographs(capsys, tmp_path):
    small = ["--batch-size", "1", "--rounds", "2", "--image-size", "96"]
    code = kernels_cli.main(["bench", *small, "--save-weights", str(tmp_path)])
    out, _ = capsys.readouterr()
    assert code == 0
    assert "random weights (seed 0), 96×96, float32 on cpu" in out or torch.cuda.is_available()
    speed, parity = (out.splitlines()[start + 1 : start + 4] for start in _tables(out))
    assert [line.split()[0] for line in speed] == ["hf", "cvt", "accelerate"]
    assert all(0.2 < float(line.split()[5]) < 5 for line in speed[1:])
    assert [line.split()[0] for line in parity] == ["hf", "cvt", "accelerate"]
    for line in parity:
        difference, largest, agreement = line.split()[1:]
        assert float(difference) < 1e-4 < 1 < float(largest)
        assert agreement == "10/10"
    code, out, err = classify(capsys, sample_photos()[0], "--checkpoint", tmp_path)
    assert code == 0
    assert out.count("LABEL_") == 5
    assert "runs exact GELU; this one runs quick_gelu" in err


def test_bench_with_given_weights_and_photos(capsys, weights, photos):
    arguments = [
        "bench",
        "--checkpoint",
        str(weights[0]),
        "--images",
        photos[1],
        "--batch-size",
        "3",
        "--rounds",
        "1",
        "--image-size",
        "64",
    ]
    assert kernels_cli.main(arguments) == 0
    out, _ = capsys.readouterr()
    assert f"cvt_13, {weights[0]}, 64×64, float32" in out
    assert out.splitlines()[-1].split()[-1] == "5/5"


def test_bench_bad_input(capsys, tmp_path, monkeypatch):
    def fails(*arguments):
        return bad(capsys, kernels_cli.main, "bench", *arguments)

    torch.save({"fc.weight": torch.ones(2, 2)}, tmp_path / "other.pth")
    (tmp_path / "file").write_text("")
    assert "none.jpg does not exist" in fails("--images", tmp_path / "none.jpg")
    assert "other.pth: is not a CvT of cvt_13" in fails("--checkpoint", tmp_path / "other.pth")
    assert "--rounds: got '-1', expected a positive integer" in fails("--rounds", -1)
    below = tmp_path / "file" / "below"
    assert f"--save-weights: {below} cannot be written: {below.parent}" in fails("--save-weights", below)
    assert f"--report: {below} cannot be written" in fails("--report", below)
    assert f"--json: {tmp_path} is a directory, expected a file" in fails("--json", tmp_path)
    assert "none/x.json cannot be written" in fails("--json", tmp_path / "none" / "x.json")
    assert "results: " in fails("--against", tmp_path / "none.json")
    assert "file is not JSON" in fails("--compare", tmp_path / "file", tmp_path / "file")
    assert "peers: got 'jax', expected hf, compile, compile-max, eager" in fails("--peers", "hf,jax")
    assert "invalid choice: 'int8'" in fails("--dtype", "int8")
    assert "model: got 'cvt_99'" in fails("--model", "cvt_99")
    monkeypatch.setattr("cvt_kernels.backends._requested", "triton")
    assert "backend 'triton' is unavailable" in fails("--save-weights", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    monkeypatch.setattr("cvt_kernels.backends._requested", "auto")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is not installed; pip install 'cvt-kernels[bench]'" in fails()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="cvt-kernels\\[bench\\]"):
        sample_photos()


def test_randomize_is_reproducible_and_lets_no_tensor_idle():
    a, b = (create_model("cvt_13", num_classes=5).eval() for _ in range(2))
    for model in (a, b):
        randomize(model)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(a(x), b(x))
    a(x).sum().backward()
    assert (a(x)[0] - a(x)[1]).abs().max() > 0.3  # the logits depend on the image


def test_installed_command():
    script = Path(sys.executable).parent / "cvt"
    version = subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("cvt 0.")
    assert subprocess.run([script], capture_output=True, check=False).returncode == 2


def test_doctor_command_and_a_reader_that_leaves_early(tmp_path):
    script = Path(sys.executable).parent / "cvt"
    result = subprocess.run([script, "doctor"], capture_output=True, text=True, check=True)
    assert "conv_projection  no (1)" in result.stdout
    assert "linear layers, inference on the CPU: float32 by " in result.stdout
    wrong = subprocess.run(
        [script, "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "CVT_KERNELS_BACKEND": "x"},
        check=False,
    )
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.startswith("cvt doctor: error: CVT_KERNELS_BACKEND: got 'x', expected one of")
    assert wrong.stderr.count("\n") == 1
    read, write = os.pipe()
    os.close(read)
    closed = subprocess.run([script, "doctor"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (closed.returncode, closed.stderr) == (0, "")
