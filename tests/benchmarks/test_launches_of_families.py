"""The kernels of PyTorch in a forward of each family on a GPU, by name: no others are launched."""

import collections
import copy
import itertools

import pytest
import torch

from cvt.tools.commands.pyramids import PYRAMIDS, build_pyramid, quiet_transformers
from tests.benchmarks import forwards

HALF = torch.bfloat16, torch.float16


def of_cvt():
    transformers = quiet_transformers()
    return transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=1000))


#: Family → its model at the published sizes, the size of its images, its blocks, those with a reduction, and
#: how ``accelerate`` may treat it. A live CvT of ``freeze=None`` is served as a frozen one is, but not while
#: something counts its operators.
FAMILIES = {
    "cvt": (of_cvt, 224, 13, 0, (True, False)),
    "segformer": (lambda: build_pyramid("segformer_b0", None, 512), 512, 8, 6, (True, None, False)),
    "pvt": (lambda: build_pyramid("pvt_tiny", None, 224), 224, 8, 6, (True, None, False)),
    "pvt_v2": (lambda: build_pyramid("pvt_v2_b2", None, 224), 224, 16, 13, (True, None, False)),
    "glpn": (
        lambda: build_pyramid("glpn", None, 480).glpn,  # its encoder
        480,
        sum(PYRAMIDS["glpn"].sizes["depths"]),
        38,
        (True, None, False),
    ),
}

#: Products, by cuBLAS: of linear layers, of the smaller maps of SegFormer's head, of a classifier.
PRODUCTS = {"linear: addmm", "segmentation_head: mm", "PyTorch: addmm"}
#: By cuDNN, with its LayerNorm in one kernel of ours: windows that overlap, and all windows of float32.
CONVOLUTIONS = {"conv_embedding: convolution"}


def allowed(family, freeze, dtype, batch):
    """Returns how often each other kernel of PyTorch is launched."""
    expected = collections.Counter()
    if dtype not in HALF:
        expected["conv_embedding: clone"] += 1  # the images, with channels last for cuDNN
    if family == "cvt":
        if not freeze:
            # Upstream puts the class token before the last stage's tokens; a block that computes it alone is
            # told so by an index.
            expected.update({"PyTorch: cat": 1, "PyTorch: zeros": 1})
        if batch > 1:
            # The last block takes the class token out of its tokens, if it computes it alone.
            expected["PyTorch: clone"] += 1
    if family == "glpn":
        expected["PyTorch: clone"] += 1  # of the result, whose map lies in memory as upstream's
    if family == "pvt_v2":
        expected["PyTorch: mean"] += 1  # of the tokens before the classifier
    return +expected


@pytest.mark.parametrize("family", FAMILIES)
def test_no_other_kernel_of_pytorch_is_launched(family):
    make, size, blocks, reducing, states = FAMILIES[family]
    own = make().to("meta")
    calls = (torch.bfloat16, 1), (torch.float16, 16), (torch.float32, 16)
    for freeze, (dtype, batch) in itertools.product(states, calls):
        noted = forwards.evaluation_launches(
            copy.deepcopy(own), (batch, 3, size, size), dtype=dtype, freeze=freeze
        )
        others = collections.Counter(str(each) for each in noted if not each.is_ours)
        for name in PRODUCTS | CONVOLUTIONS:
            others.pop(name, None)
        assert others == allowed(family, freeze, dtype, batch), (freeze, dtype, batch)
        ours = collections.Counter(str(each) for each in noted if each.is_ours)
        attended = [name for name in ours if "attention_fwd" in name or "attention_add" in name]
        assert sum(ours[name] for name in attended) == blocks, (freeze, dtype, batch)
        if dtype in HALF and family != "cvt":
            assert ours["reduction_linear"] == reducing
            assert ours["conv_embedding_patches"] == 3 * (family == "pvt")
        # LayerNorm, reduction with K and V, attention, its end, the MLP's convolution or GELU, and its end.
        assert family == "cvt" or ours.total() >= 4 * blocks + reducing


def test_an_added_copy_is_named():
    model = build_pyramid("segformer_b0", None, 64)
    model.register_forward_hook(lambda module, args, out: out.logits.clone())
    noted = forwards.evaluation_launches(model, (1, 3, 64, 64))
    others = {str(each) for each in noted if not each.is_ours} - PRODUCTS - CONVOLUTIONS
    assert others == {"PyTorch: clone"}
