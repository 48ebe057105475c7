"""A try of cvt-kernels as it is installed: it classifies a photograph and accelerates Hugging Face's CvT.

``make wheel`` and the builds of wheels run it in an environment that has a wheel, transformers
and scikit-learn. It sees nothing of the source tree.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import sklearn
import torch
import transformers

import cvt
import cvt.factory
import cvt_kernels as ck
from cvt_kernels import machine

PHOTO = Path(sklearn.__file__).parent / "datasets/images/china.jpg"
COMMANDS = ([str(Path(sys.executable).parent / "cvt")], [sys.executable, "-m", "cvt"])


def try_package() -> None:
    """Looks at the files and the version of the package."""
    folder = Path(ck.__file__).parent
    assert "site-packages" in folder.parts, folder
    assert importlib.metadata.version("cvt-kernels") == ck.__version__ == cvt.__version__
    assert all((Path(package.__file__).parent / "py.typed").exists() for package in (cvt, ck))
    reason = machine.why_extension_unavailable("cpu")
    assert reason is None, reason
    print(ck.doctor())


def try_command(folder: str) -> None:
    """Classifies a photograph with made-up weights, by both names of the command."""
    model = cvt.create_model("cvt_13", activation="gelu")
    cvt.factory.randomize(model)
    cvt.save_huggingface(model, folder)
    arguments = ["classify", str(PHOTO), "--checkpoint", folder, "--activation", "gelu"]
    printed = [
        subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout
        for command in COMMANDS
    ]
    assert printed[0] == printed[1]
    assert "china" in printed[0]
    print(printed[0])


def try_acceleration() -> None:
    """Compares Hugging Face's model with itself after ``accelerate``."""
    model = transformers.CvtForImageClassification(transformers.CvtConfig()).eval()
    images = torch.rand(2, 3, 224, 224)
    with torch.inference_mode():
        expected = model(images).logits
        ck.accelerate(model, freeze=True)
        torch.testing.assert_close(model(images).logits, expected, rtol=1e-3, atol=1e-3)
    print(str(ck.coverage(model)).splitlines()[-1])


if __name__ == "__main__":
    warnings.simplefilter("error", RuntimeWarning)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # entries of this try are of no use to anybody
        try_package()
        try_command(f"{folder}/model")
        try_acceleration()
