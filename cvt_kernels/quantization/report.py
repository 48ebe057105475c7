"""The report of ``quantize``: the scheme and the error of every layer, and why others stay as they are."""

from __future__ import annotations

from typing import NamedTuple

from ..tables import aligned


class QuantizedLayerReport(NamedTuple):
    """A row of the report: one layer.

    Attributes:
        path: Its name in ``model.named_modules()``.
        scheme: ``"dynamic"``, ``"static"``, or ``"float"`` if it stays as it is.
        sqnr: The ratio of its output to the error of this output on the calibration's images, in dB, where
            its inputs are those of the model in floating point; None without calibration.
        reason: Says why it stays as it is, or why it has another scheme than was asked for; None otherwise.
    """

    path: str
    scheme: str
    sqnr: float | None
    reason: str | None


class QuantizationReport(list[QuantizedLayerReport]):
    """The rows of a report, in the order of the model; as a string, a table of them."""

    def worst(self) -> list[QuantizedLayerReport]:
        """Returns the rows that have an SQNR, the lowest first."""
        measured = [(row.sqnr, row) for row in self if row.sqnr is not None]
        return [row for _, row in sorted(measured, key=lambda pair: pair[0])]

    def __str__(self) -> str:
        table = [("layer", "scheme", "SQNR", "remark")]
        for row in self:
            sqnr = "–" if row.sqnr is None else f"{row.sqnr:.1f} dB"
            table.append((row.path, row.scheme, sqnr, row.reason or ""))
        done = sum(row.scheme != "float" for row in self)
        return "\n".join([*aligned(table, right=(2,)), "", f"{done} of {len(self)} layers quantized"])
