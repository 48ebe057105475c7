"""Damaged checkpoints of every format are read or refused in one line; ``tests/cvt/damage.py`` makes them."""

import random

from tests.cvt.damage import mutations, why_wrong


def test_damaged_checkpoints(tmp_path):
    wrong = []
    for i, (what, place) in enumerate(mutations(random.Random(0), tmp_path)):
        reason = why_wrong(place)
        if reason is not None:
            wrong.append(f"{what}: {reason}")
        if i == 60:
            break
    assert not wrong
