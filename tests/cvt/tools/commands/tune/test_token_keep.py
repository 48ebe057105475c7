"""cvt tune of models that drop tokens."""

import torch

from cvt.tools.commands import main
from cvt.tools.commands.tune import cache_keys
from cvt.tools.commands.tune.cache_keys import Workload, _without_entropy, collect

ON_ROWS = ["gather_rows", "gather_add_layer_norm", "scatter_rows"]


def test_a_model_with_token_pruning_has_cache_keys_of_rows():
    workload = Workload("cvt_13", 32, [2], ["float32"], train=True, token_keep=0.5)
    asked = [each for each in collect(workload, torch.device("cpu")) if each.operator in ON_ROWS]
    kinds = {tuple(each.text.split(", ")[:2]) for each in asked}
    assert kinds == {
        (operator, direction) for operator in ON_ROWS for direction in ("forward", "forward+backward")
    }
    for each in asked:
        made = each.make_arguments(torch.device("cpu"))
        x, rows = made["x"], made["rows"]
        assert rows.dtype == torch.int64
        assert all(len(set(image)) == len(image) for image in rows.tolist())  # none twice
        assert 0 <= int(rows.min()) <= int(rows.max()) < x.shape[1]


def test_entropy_is_tuned_for_the_least_and_the_most_that_stay():
    workload = Workload("cvt_13", 64, [1], ["float32"], train=False, token_keep="entropy")
    assert [each.token_keep for each in _without_entropy(workload)] == [0.5, 0.9]
    listed = workload._replace(token_keep=(1.0, "entropy", 0.7, 1.0))
    assert [each.token_keep for each in _without_entropy(listed)] == [(1, 0.5, 0.7, 1), (1, 0.9, 0.7, 1)]
    assert ON_ROWS[0] in {each.operator for each in collect(workload, torch.device("cpu"))}


def test_the_command_takes_what_other_commands_take(monkeypatch):
    asked = []

    def collect(workload, device):
        asked.append(workload.token_keep)
        return []

    monkeypatch.setattr(cache_keys, "collect", collect)
    for text in ("0.7", "entropy", "1,entropy,0.5,1"):
        assert main(["tune", "--token-keep", text]) == 0
    assert asked == [0.7, "entropy", (1.0, "entropy", 0.5, 1.0)]
