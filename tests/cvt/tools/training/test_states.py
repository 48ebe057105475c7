"""Damaged files to go on from: refused in one line that names them."""

import copy

import pytest
import torch

from cvt import CheckpointError
from cvt.tools.training.trainer import LAST
from tests.cvt.tools.training.test_trainer import trainer

RECIPE = {"epochs": 1, "warmup_epochs": 0}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer(folder, **RECIPE).fit()
    return torch.load(folder / LAST, weights_only=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("epoch"), "KeyError: 'epoch'"),
        (lambda state: state.pop("same"), "KeyError: 'same'"),
        (lambda state: state.update(model=3), "damaged, or of another version: TypeError: "),
        (lambda state: state["model"].update({"norm.bias": torch.ones(3)}), "size mismatch for norm.bias"),
        (lambda state: state["model"].pop("norm.bias"), "Missing key.*norm.bias"),
        (lambda state: state.pop("optimizer"), "KeyError: 'optimizer'"),
        (lambda state: state["same"].update(lr="\x1b[31m\n"), r"trained with lr '.x1b.31m.n', now 0.001"),
    ],
)
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


def test_a_state_that_is_whole_is_read(state, tmp_path):
    """The optimizer's settings come from the recipe, whatever the file says."""
    damaged = copy.deepcopy(state)
    damaged["optimizer"]["param_groups"][0] |= {"betas": "x", "amsgrad": True, "lr": None}
    torch.save(damaged, tmp_path / LAST)
    resumed = trainer(tmp_path, resume=True, **RECIPE)
    assert resumed.epoch == 1
    group = resumed.optimizer.param_groups[0]
    assert (group["betas"], group["amsgrad"]) == ((0.9, 0.999), False)
