"""The notebook of the documentation runs from its first cell to its last, and is stored without outputs."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


@pytest.fixture
def notebook():
    import nbformat

    read = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    return read


def test_it_is_stored_without_outputs(notebook):
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
def test_it_runs(notebook, monkeypatch, tmp_path):
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    warned = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in warned if "IProgress not found" not in text]  # tqdm wants ipywidgets
    assert "9 of 9 blocks fused" in printed
    assert "as accurate as it was" in printed
    accuracy = float(printed.split("% of 297 held-out digits")[0].split()[-1])
    assert accuracy > 90
