"""The same call gives the same bits in every process and, where our kernels serve, for any threads."""

import ast
import hashlib
import itertools

import pytest
import torch

import cvt_kernels as ck
from tests import upstream
from tests.processes import run_python
from tests.upstream import images, logits

#: The families, and the height and width of images, which fill no tile of a kernel; PVT is made for its own.
SIZES = {
    upstream.huggingface: (160, 224),
    upstream.microsoft_plain: (160, 224),
    upstream.ours: (160, 224),
    upstream.segformer: (160, 224),
    upstream.pvt: (70, 70),
    upstream.pvt_v2: (288, 512),
    upstream.pvt_v2_linear: (160, 224),
    upstream.glpn: (160, 224),
    upstream.vit: (32, 32),
    upstream.dinov2: (160, 224),
    upstream.clip: (32, 32),
    upstream.timm_vit: (32, 32),
    upstream.timm_pvt_v2: (160, 224),
}
FAMILIES = {make.__name__: make for make in SIZES}
#: The ways to serve a model, by ``freeze``.
WAYS = {"live": False, "served": None, "frozen": True, "quantized": None}


def ways_of(family):
    """Returns the ways to serve a family; a PVT v2 with linear attention has nothing to freeze."""
    return [way for way in WAYS if (family, way) != ("pvt_v2_linear", "frozen")]


def bits_of(family, *threads):
    """Returns, for each way and dtype, digests of the results of calls with these numbers of threads."""
    make, before, found = FAMILIES[family], torch.get_num_threads(), {}
    try:
        for dtype, way in itertools.product((torch.float32, torch.bfloat16), ways_of(family)):
            torch.manual_seed(0)
            model, x = make().eval().to(dtype), images(1, *SIZES[make], dtype)
            ck.accelerate(model, freeze=WAYS[way])
            if way == "quantized":
                ck.quantize(model)
            digests = found[way, str(dtype)] = []
            for count in threads:
                torch.set_num_threads(count)
                with torch.inference_mode(), ck.use_backend(*upstream.KERNELS_FIRST):
                    out = logits(model(x)).contiguous()
                digests.append(hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()[:8])
    finally:
        torch.set_num_threads(before)
    return found


#: Those whose blocks are like another's are for ``make combinations``.
every_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.rest] if family in ("pvt_v2_linear", "clip") else [])
        for family in FAMILIES
    ],
)


@pytest.fixture(scope="module")
def elsewhere(request):
    """Returns what another process computes: one for all families, since it takes long to start."""
    cases = [item.callspec for item in request.session.items if item.path == request.path]
    result = run_python(
        f"from {__name__} import bits_of\n"
        f"for family in {[case.params['family'] for case in cases]}:\n"
        "    print({family: bits_of(family, 1, 1, 2, 2, 2)})"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return {family: found for line in lines for family, found in ast.literal_eval(line).items()}


@every_family
def test_ten_calls_in_two_processes_give_the_same_bits(family, elsewhere):
    here, there = bits_of(family, *10 * [1]), elsewhere[family]
    assert len(here) == 2 * len(ways_of(family))
    for key, digests in here.items():
        of_one, of_two = there[key][:2], there[key][2:]
        assert {*digests, *of_one} == {digests[0]}, (key, digests, of_one)
        # PyTorch's products, which live blocks have, may split a sum among the threads.
        assert set(of_two) == {of_two[0] if key[0] == "live" else digests[0]}, (key, digests, of_two)
