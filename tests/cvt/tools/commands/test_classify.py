"""``cvt classify``, as a person runs it."""

import json

import torch

from cvt import save_huggingface
from cvt.images import load_images
from cvt.tools.commands import main
from tests.checks import bad, run
from tests.cvt.models import small


def classify(*arguments):
    return run(main, "classify", *arguments)


def test_classify_prints_the_models_own_top_5(weights, photos, tmp_path):
    path, model = weights
    names = [f"thing {i}" for i in range(12)]
    (tmp_path / "labels.txt").write_text("\n".join(names))
    out, _ = classify(*photos, "--checkpoint", path, "--labels", tmp_path / "labels.txt")
    with torch.inference_mode():
        top = model(load_images(photos)).softmax(-1).topk(5)
    expected = []
    for photo, values, indices in zip(photos, top.values.tolist(), top.indices.tolist(), strict=True):
        expected += [photo, *(f"  {v:7.2%}  {names[i]}" for v, i in zip(values, indices, strict=True))]
    assert out.splitlines() == expected


def test_classify_without_labels_in_small_batches(weights, photos):
    path, _ = weights
    whole, _ = classify(*photos, "--checkpoint", path, "--device", "cpu")
    assert "%  class " in whole
    options = ("--batch-size", "1", "--top", "12", "--image-size", "224", "--model", "cvt_13")
    single, _ = classify(*photos, "--checkpoint", path, *options)
    assert len(single.splitlines()) == 2 * 13
    assert [line for line in single.splitlines() if line in whole.splitlines()][:3] == whole.splitlines()[:3]


def test_classify_takes_labels_and_images_of_a_hugging_face_model(photos, tmp_path):
    model = small(activation="gelu").eval()
    save_huggingface(model, tmp_path, labels=[f"thing {i}" for i in range(10)], image_size=48)
    out, err = classify(photos[0], "--checkpoint", tmp_path)
    assert (out.count("%  thing "), err) == (5, "")
    with torch.inference_mode():
        expected = model(load_images(photos[:1], 48)).softmax(-1).max()
    assert f"{expected:7.2%}" in out


def test_classify_fetches_the_published_weights(capsys, hub, photos, tmp_path):
    labels = [f"thing {i}" for i in range(10)]
    for name in ("microsoft/cvt-13", "microsoft/cvt-21"):
        hub.publish(name, small(), labels=labels, image_size=48)
    out, err = classify(photos[0])
    assert (out.count("%  thing "), err) == (5, "")
    assert all("/microsoft/cvt-13/" in path for path in hub.downloads())
    same = classify(photos[0], "--checkpoint", "microsoft/cvt-13@main", "--activation", "quick_gelu")
    assert same == (out, "")
    line = bad(capsys, main, "classify", photos[0], "--model", "cvt_21")
    assert "microsoft/cvt-21: config.json has embed_dim [8, 16, 24], this model [64, 192, 384]" in line


def test_classify_says_what_it_chose_by_its_own_options(capsys, hub, photos):
    folder = hub.publish("someone/cvt", small(), image_size=48)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"resample": 2}))
    _, err = classify(photos[0], "--checkpoint", "someone/cvt")
    activation, images = sorted(err.splitlines(), reverse=True)
    assert activation.startswith("cvt classify: someone/cvt is a Hugging Face model, which runs exact GELU")
    assert activation.endswith("choose by activation='gelu' or 'quick_gelu'")
    assert images.startswith("cvt classify: preprocessor_config.json asks for resample 2")
    _, err = classify(photos[0], "--checkpoint", "someone/cvt", "--activation", "gelu")
    assert err.splitlines() == [images]
    assert "a/b is no path here and cannot be loaded from the Hugging Face Hub" in bad(
        capsys, main, "classify", photos[0], "--checkpoint", "a/b"
    )
