"""Every launch of a frozen model's forward, counted without a GPU."""

from pathlib import Path

import pytest
import torch

from benchmarks.machine_code import forward

PAGE = Path(__file__).parents[3] / "docs" / "kernels.md"


@pytest.fixture(scope="module")
def launches():
    return forward.forward_launches()


def test_launches_of_a_forward(launches):
    assert len(launches) <= 90
    # Besides the kernels of this project: two convolutions, the head, and copies of the class token.
    others = [launch.kernel for launch in launches if launch.operator == "PyTorch"]
    assert sorted(others) == ["addmm", "clone", "copy_"]
    convolutions = [launch for launch in launches if launch.kernel == "convolution"]
    assert [launch.part for launch in convolutions] == ["stage 2", "stage 3"]


def test_bytes_and_operations_of_a_forward(launches):
    microseconds = sum(launch.floor_microseconds(90) for launch in launches) / 256
    assert microseconds <= 25
    # The paper counts 4.5 G multiply-adds for an image; depthwise convolutions are no matrix products, and
    # the last block computes the class token alone.
    assert 2 * 4.1e9 < sum(launch.flops for launch in launches) / 256 < 2 * 4.4e9


def test_another_model_and_size():
    few = forward.forward_launches("cvt_13", batch=1, dtype=torch.float16, arch=80, image_size=64)
    more = forward.forward_launches("cvt_21", batch=1, dtype=torch.float16, arch=80, image_size=64)
    assert len(few) < len(more)
    assert sum(launch.bytes for launch in few) < sum(launch.bytes for launch in more)


def test_the_page_has_the_table(launches):
    assert "\n".join(forward.table(launches)) in PAGE.read_text(encoding="utf-8")


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="has no"):
        forward.main([page])
    assert page.read_text(encoding="utf-8") == "nothing"
