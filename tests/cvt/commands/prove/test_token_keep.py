"""cvt prove of models that drop tokens."""

import torch

from cvt.commands import main
from cvt.commands.prove.questions import Workload, collect
from tests.checks import bad

ON_ROWS = ["gather_rows", "gather_add_layer_norm", "scatter_rows"]


def test_a_model_that_drops_tokens_asks_for_rows():
    workload = Workload("cvt_13", 32, [2], ["float32"], train=True, token_keep=0.5)
    asked = [each for each in collect(workload, torch.device("cpu")) if each.operator in ON_ROWS]
    kinds = {tuple(each.text.split(", ")[:2]) for each in asked}
    assert kinds == {
        (operator, direction) for operator in ON_ROWS for direction in ("forward", "forward+backward")
    }
    for each in asked:
        args, _ = each.make_arguments(torch.device("cpu"))
        x, rows = args[:2]
        assert rows.dtype == torch.int64
        assert all(len(set(image)) == len(image) for image in rows.tolist())  # none twice
        assert 0 <= int(rows.min()) <= int(rows.max()) < x.shape[1]


def test_an_impossible_fraction(capsys):
    error = bad(capsys, main, "prove", "--token-keep", "1.5", "--image-size", "32")
    assert "token_keep: got 1.5, expected a fraction above 0 and at most 1" in error
