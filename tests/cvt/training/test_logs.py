"""The plot of the learning curve."""

import pytest
from matplotlib.figure import Figure

from cvt.images import read_image
from cvt.training.logs import Logs


@pytest.mark.parametrize("epochs", [1, 3, 300])
def test_curves_are_in_words_percent_and_whole_epochs(tmp_path, epochs):
    figures = []

    def kept(*arguments, **keywords):
        figures.append(Figure(*arguments, **keywords))
        return figures[-1]

    logs = Logs(tmp_path, 0)
    logs._figure = kept
    values = {"train_loss": 2.0, "val_loss": 1.0, "top1": 0.5, "top5": 0.9}
    logs.close([{"epoch": epoch, **values} for epoch in range(1, epochs + 1)])
    assert read_image(tmp_path / "curves.png").size == (900, 400)
    losses, accuracies = figures[0].axes
    named = {
        line.get_label(): line.get_ydata()[-1] for axes in (losses, accuracies) for line in axes.get_lines()
    }
    assert named == {
        "training loss": 2.0,
        "validation loss": 1.0,
        "top-1 accuracy": 0.5,
        "top-5 accuracy": 0.9,
    }
    for axes in (losses, accuracies):
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.get_xlabel() == "epoch"
        assert {text.get_text() for text in axes.get_legend().get_texts()} <= named.keys()
    assert all(tick.get_text().endswith("%") for tick in accuracies.get_yticklabels())
