"""Made-up weights."""

import torch

from cvt import create_model
from cvt.factory import randomize


def test_randomize_is_reproducible_and_leaves_no_tensor_constant():
    a, b = (create_model("cvt_13", num_classes=5).eval() for _ in range(2))
    for model in (a, b):
        randomize(model)
    for tensor in (*a.parameters(), *a.buffers()):
        assert not tensor.is_floating_point() or tensor.unique().numel() > 1
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(a(x), b(x))
    a(x).sum().backward()
    assert (a(x)[0] - a(x)[1]).abs().max() > 0.3  # the logits depend on the image
