"""The photographs and the weights that tests of several commands take."""

import pytest
import torch

from cvt import create_model
from cvt.factory import randomize
from cvt.images import sample_photos
from cvt_kernels.tuning import clock


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Writes an official-looking CvT-13 checkpoint of 12 classes; returns its path and the model."""
    model = create_model("cvt_13", num_classes=12).eval()
    randomize(model)
    path = tmp_path_factory.mktemp("weights") / "CvT-13.pth"
    torch.save(model.state_dict(), path)
    return path, model


@pytest.fixture
def photos():
    return [str(path) for path in sample_photos()]


@pytest.fixture(scope="module", autouse=True)
def _idle():
    """Lets commands take the machine for idle, however busy that of the tests is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock.Times, "is_disturbed", False)
        yield
