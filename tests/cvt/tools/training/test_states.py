"""Damaged files to go on from: refused in one line that names them."""

import copy

import pytest
import torch

from cvt import CheckpointError
from cvt.tools.training.trainer import LAST
from tests.cvt.tools.training.test_trainer import trainer

RECIPE = {"epochs": 1, "warmup_epochs": 0}
ONE_FOR_ALL = torch.zeros(1).expand(2**31)


def doubled():
    """Returns a short list of lists that are as many as 2 to the power of 40 if each is looked at."""
    rows = [0]
    for _ in range(40):
        rows = [rows, rows]
    return rows


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer(folder, **RECIPE).fit()
    return torch.load(folder / LAST, weights_only=True)


def set_value(*keys, value):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value(state[keys[-1]]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("epoch"), "has no epoch"),
        (lambda state: state["same"].pop("config"), "config: got None, expected an object"),
        (set_value("epoch", value=True), "epoch: got True, expected int"),
        (set_value("epoch", value=10**9), "history: got 1 rows, expected one for each of 1000000000 epochs"),
        (set_value("history", value=[3]), "history: got 3, expected a row of numbers"),
        (set_value("history", 0, "seconds", value="x"), "history: got 'x' for 'seconds', expected a number"),
        (lambda state: state["history"][0].pop("top1"), "history: got None for 'top1'"),
        (set_value("history", 0, "top1", value=float("nan")), "history: got nan for top1, expected a finite"),
        (set_value("same", "config", "depths", value=[1, 10**8]), "depths: got 100000000"),
        (set_value("same", "lr", value=torch.ones(3)), "is damaged, or of another version: Bool"),
        (set_value("model", value=3), "model: got 3, expected Mapping"),
        (set_value("model", "norm.bias", value=lambda x: x * float("nan")), "model: norm.bias: has numbers"),
        (set_value("model", "norm.bias", value=lambda x: x[:-1]), "size mismatch for norm.bias"),
        (set_value("model", "norm.bias", value=ONE_FOR_ALL), r"has \d+ bytes, and its tensors have 8\d{9};"),
        (set_value("same", "lr", value=[ONE_FOR_ALL]), r"has \d+ bytes, and its tensors have 858\d{7};"),
        (set_value("model", "norm.bias", value=torch.ones(3, device="meta")), "torch.strided on meta, "),
        (set_value("history", value=doubled()), "got 2 rows"),
        (lambda state: state["model"].pop("norm.bias"), "Missing key.*norm.bias"),
        (lambda state: state["optimizer"].pop("param_groups"), "param_groups"),
        (set_value("optimizer", "param_groups", 0, "params", value=[0]), "has groups of other parameters"),
        (set_value("optimizer", "state", 0, "step", value=-1), "optimizer: step: got -1, expected"),
        (set_value("same", "lr", value="\x1b[31m\n"), r"was trained with lr '.x1b.31m.n', now 0.001"),
        (set_value("optimizer", "state", 0, "exp_avg", value=lambda x: x[:1]), "got exp_avg "),
        (set_value("optimizer", "state", 0, "exp_avg", value=lambda x: x / 0 * 0), "exp_avg: has numbers"),
        (lambda state: state["optimizer"]["state"][0].pop("exp_avg"), "exp_avg"),
        (set_value("optimizer", "state", value=[]), "resume: "),
    ],
)  # fmt: skip
def test_damaged_states(state, tmp_path, change, message):
    damaged = copy.deepcopy(state)
    change(damaged)
    torch.save(damaged, tmp_path / LAST)
    with pytest.raises((CheckpointError, ValueError), match=message) as caught:
        trainer(tmp_path, resume=True, **RECIPE)
    line = str(caught.value)
    assert str(tmp_path / LAST) in line
    assert line.isprintable()
    assert len(line) < 1000


def test_a_file_of_something_else(tmp_path):
    """Files that torch.save has not written are in test_reading.py."""
    torch.save([1], tmp_path / LAST)
    with pytest.raises(CheckpointError, match=r"last.pth is damaged, .*: got \[1\], expected an object"):
        trainer(tmp_path, resume=True, **RECIPE)


def test_a_state_that_is_whole_is_read(state, tmp_path):
    """The optimizer's settings come from the recipe, whatever the file says."""
    damaged = copy.deepcopy(state)
    damaged["optimizer"]["param_groups"][0] |= {"betas": "x", "amsgrad": True, "lr": None}
    torch.save(damaged, tmp_path / LAST)
    resumed = trainer(tmp_path, resume=True, **RECIPE)
    assert resumed.epoch == 1
    group = resumed.optimizer.param_groups[0]
    assert (group["betas"], group["amsgrad"]) == ((0.9, 0.999), False)
