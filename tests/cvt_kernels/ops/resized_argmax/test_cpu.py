"""Classes of resized logits on a CPU: smooth regions, and what is refused."""

import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, reference
from tests.checks import needs_extension


def run(logits, size):
    with torch.no_grad(), ck.use_backend("cpu"):
        return ck.resized_argmax(logits, size)


@needs_extension
def test_smooth_logits_of_a_few_regions():
    """A photograph has such: nearly all pixels have neighbors of one class; classes are PyTorch's."""
    coarse = torch.randn(2, 21, 3, 4, generator=torch.Generator().manual_seed(0))
    logits = F.interpolate(coarse, (32, 40), mode="bicubic").contiguous(memory_format=torch.channels_last)
    out = run(logits, (128, 160))
    labels = logits.argmax(1)
    assert (labels[:, :, 1:] == labels[:, :, :-1]).float().mean() > 0.8
    assert torch.equal(out, reference.resized_argmax(logits, (128, 160)))


@needs_extension
def test_what_is_refused():
    bind = backends.operators["resized_argmax"].bind
    why = backends.implementations["resized_argmax"]["cpu"].load().why_unsupported
    logits = torch.randn(2, 3, 4, 5)
    assert why(bind(logits, (8, 9))) is None
    assert "1048576" in why(bind(logits, (2**20 + 1, 9)))
