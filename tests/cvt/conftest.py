"""A folder of label maps, for tests of segmentation."""

import pytest

from tests.cvt.models import save_label_maps


@pytest.fixture
def label_maps(tmp_path):
    """Returns a folder of images whose colors tell the labels of their pixels, 0 to 2 or 255."""
    return save_label_maps(tmp_path / "data")
