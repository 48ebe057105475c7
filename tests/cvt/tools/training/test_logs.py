"""The plot of the learning curve."""

import pytest
from matplotlib.figure import Figure

from cvt.images import read_image
from cvt.tools.training.logs import Logs


def test_later_rows_may_have_more_columns(tmp_path):
    Logs(tmp_path, 0).epoch(2, [{"epoch": 1, "top1": 0.5}, {"epoch": 2, "top1": 0.75, "seconds": 3.0}])
    assert (tmp_path / "log.csv").read_text() == "epoch,top1,seconds\n1,0.5,\n2,0.75,3.0\n"


@pytest.mark.parametrize("epochs", [1, 3, 300])
def test_curves_are_in_words_percent_and_whole_epochs(tmp_path, epochs):
    figures, logs = [], Logs(tmp_path, 0)
    logs._figure = lambda **keywords: figures.append(Figure(**keywords)) or figures[-1]
    values = {"train_loss": 2.0, "val_loss": 1.0, "top1": 0.5, "top5": 0.9}
    logs.close([{"epoch": epoch, **values} for epoch in range(1, epochs + 1)])
    assert read_image(tmp_path / "curves.png").size == (900, 400)
    losses, accuracies = figures[0].axes
    lines = [(line.get_label(), line.get_ydata()[-1]) for line in losses.get_lines() + accuracies.get_lines()]
    assert lines == [
        ("training loss", 2.0),
        ("validation loss", 1.0),
        ("top-1 accuracy", 0.5),
        ("top-5 accuracy", 0.9),
    ]
    for axes in (losses, accuracies):
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.get_xlabel() == "epoch"
        assert len(axes.get_legend().get_texts()) == 2
    assert all(tick.get_text().endswith("%") for tick in accuracies.get_yticklabels())
