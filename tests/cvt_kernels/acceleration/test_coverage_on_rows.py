"""The operators that coverage lists for blocks of a model that drops tokens."""

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from tests.upstream import images

SMALL = CvTConfig(embed_dims=(8, 16, 24), depths=(1, 1, 4), num_heads=(1, 1, 2))


def on_rows(**settings):
    rows = ck.coverage(create_model(SMALL, **settings).eval(), images())
    return {
        row.path: [name for name in row.backends if "rows" in name or name == "gather_add_layer_norm"]
        for row in rows
    }


def test_blocks_behind_one_that_drops_tokens_have_them():
    found = on_rows(token_keep=(1.0, 0.5, 1.0, 1.0))
    for path, names in found.items():
        if path in ("stage2.blocks.2", "stage2.blocks.3"):
            assert names == ["gather_rows", "gather_add_layer_norm", "scatter_rows"]
        else:
            assert names == []


def test_others_do_not():
    assert not any(on_rows().values())
