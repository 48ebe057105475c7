"""Every relative link of the documentation leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def without_code(page):
    """Returns the text of a page without its code blocks, whose brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"[a-z]+:", link):  # https:, mailto:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}, but there is no {path}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}, which has no such heading"


def test_every_page_can_be_reached():
    """Starting at the README, a reader who follows links comes to every page."""
    reached, unread = set(), [ROOT / "README.md"]
    while unread:
        page = unread.pop()
        if page in reached:
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", without_code(page))
        unread += [(page.parent / link).resolve() for link in links if ":" not in link]
    assert not [page.name for page in PAGES if page not in reached]
