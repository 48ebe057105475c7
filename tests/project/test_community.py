"""Files for GitHub and for those who cite: workflows, templates and CITATION.cff."""

import re
from pathlib import Path

import pytest

import cvt_kernels as ck

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path):
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow):
    return [step for job in load(workflow)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(workflow):
    """They run targets of the Makefile, pin what they use, end in time and may only read."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in steps(workflow):
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d[\d.]*", step.get("uses", "a/b@v1"))
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert load(workflow)["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in load(workflow)["jobs"].values())


def test_changes_are_tested_and_pip_is_cached():
    workflow = ROOT / ".github" / "workflows" / "test.yml"
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands == ["make test", "make combinations", "make sanitize", "make docs", "make matrix"]
    settings = load(workflow)["env"]
    assert (settings["CVT_KERNELS_WERROR"], settings["CVT_KERNELS_CPU_SETS"]) == ("1", "all")
    pythons = [step["with"] for step in steps(workflow) if "setup-python" in step.get("uses", "")]
    assert [python["cache"] for python in pythons] == ["pip", "pip"]
    for python in pythons:
        assert all((ROOT / name).is_file() for name in python["cache-dependency-path"].split())


def test_the_citation_names_this_version_and_the_paper():
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} < set(citation)
    assert citation["version"] == ck.__version__
    [paper] = citation["references"]
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Wu", "Xiao", "Codella", "Liu", "Dai", "Yuan", "Zhang"]
    assert (paper["year"], paper["identifiers"][0]["value"]) == (2021, "arXiv:2103.15808")
