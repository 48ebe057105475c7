"""Inference throughput of CvT-13 at 224×224: Hugging Face's model and ours with the same weights."""

import pytest
import torch

from cvt import create_model, save_huggingface
from cvt_kernels.bench import randomize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from transformers import CvtForImageClassification

    directory = tmp_path_factory.mktemp("weights")
    ours = create_model("cvt_13", activation="gelu")
    randomize(ours)
    save_huggingface(ours, directory)
    peer = CvtForImageClassification.from_pretrained(directory).to(DEVICE).eval()
    return {"hugging_face": lambda x: peer(x).logits, "cvt_kernels": ours.to(DEVICE).eval()}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["hugging_face", "cvt_kernels"])
def test_cvt_13(benchmark, models, name, batch):
    x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def forward():
        logits = models[name](x)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return logits

    benchmark.group = f"CvT-13, 224×224, float32, {DEVICE}, batch {batch}"
    with torch.inference_mode():
        torch.testing.assert_close(models["cvt_kernels"](x), models["hugging_face"](x), rtol=0, atol=1e-4)
        benchmark.pedantic(forward, rounds=10, warmup_rounds=1)
    if benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info["images_per_second"] = batch / benchmark.stats.stats.median
        benchmark.extra_info["threads"] = torch.get_num_threads()
