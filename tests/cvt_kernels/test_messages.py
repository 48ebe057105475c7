"""Tables as text: cells stay as they are, columns line up, Markdown is unpadded."""

from cvt_kernels.messages import aligned, markdown


def test_columns_line_up_and_cells_stay_as_they_are():
    rows = [["case", "ratio", "by"], ["a × b", "0.10", "True"], ["", "1e5", "1_000"], ["long name", "", ""]]
    assert aligned(rows, right=[1]) == [
        "case       ratio  by",
        "a × b       0.10  True",
        "             1e5  1_000",
        "long name",
    ]


def test_markdown_is_unpadded():
    rows = [["", "images/s"], ["`hf`", "0.10"], ["`accelerate`", "1 (1–2)"]]
    lines = ["|  | images/s |", "|---|---|", "| `hf` | 0.10 |", "| `accelerate` | 1 (1–2) |"]
    assert markdown(rows) == lines
    assert markdown(rows[:2]) == lines[:3]
