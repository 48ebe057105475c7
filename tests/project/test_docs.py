"""The Python of the documentation runs as it stands."""

import re

import pytest
import torch

import cvt_kernels as ck
from cvt import create_model
from cvt_kernels.acceleration.blocks import block_of
from cvt_kernels.acceleration.freezing import STAGES
from cvt_kernels.acceleration.matching import TABLE
from tests.checks import python_blocks, run_blocks, section_of

PYRAMIDS = "## SegFormer, PVT, PVT v2 and GLPN"
PAGE = section_of("accelerate.md", "# Accelerate your model", until=PYRAMIDS)


@pytest.mark.slow
def test_accelerate_page(capsys):
    blocks = python_blocks(PAGE)
    assert len(blocks) == 11
    names = run_blocks(blocks)
    printed = capsys.readouterr().out
    assert "12 of 12 blocks fused" in printed
    assert "36 of 36 layers quantized" in printed
    assert (names["quantized"] - names["before"]).norm() < 0.1 * names["before"].norm()
    assert "as accurate as it was" in printed
    assert printed.rstrip().splitlines()[-1].startswith("tensor(")
    assert not any("cvt_kernels" in str(node.target) for node in names["program"].graph.nodes)
    assert torch.isfinite(names["loss"])


def test_graphs_page():
    text = section_of("serve.md", "## CUDA graphs")
    names = run_blocks(python_blocks(text))
    assert names["logits"].shape == (2, 2)
    assert f'`"{names["why_not"]}"`' in text
    with torch.device("meta"):
        model = create_model("cvt_13")
    assert f"{len([*model.parameters(), *model.buffers()])} parameters and buffers" in text


def test_the_pages_list_every_class():
    upstream, listed = "", set()
    for cells in re.findall(r"^\|(.*?)\|(.*?)\|.*\|$", PAGE, flags=re.MULTILINE):
        upstream = cells[0].replace("`", "").strip() or upstream
        listed |= {(upstream, name) for name in re.findall("`(.*?)`", cells[1])}
    classes_there = section_of("accelerate.md", "### Classes")
    for classes in re.findall(r"^\| (`.*?) \|", classes_there, flags=re.MULTILINE):
        listed |= {("Hugging Face", name) for name in re.findall("`(.*?)`", classes)}
    blocks = {(entry.upstream, entry.name) for entry in TABLE.values()}
    served = map(block_of, STAGES.values())
    frozen = {(entry.upstream, entry.name) for entry in served} - blocks
    assert listed == blocks | {(f"{upstream}, in evaluation", name) for upstream, name in frozen}


@pytest.mark.parametrize("name", ["accelerate", "coverage", "quantize", "restore", "verify"])
def test_what_the_page_uses_is_public(name):
    assert name in ck.__all__
