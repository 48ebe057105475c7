"""The documentation as a site: every page is on it, with the links, lists and tables that GitHub shows."""

import html
import re
from pathlib import Path

import pytest

from tests.project.test_docs_links import PAGES, without_code

ROOT = Path(__file__).parents[2]
NAMES = {"README.md": "index", "docs/README.md": "pages", "CONTRIBUTING.md": "contributing"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Returns the folder of the site, whose strict build ends where there is anything to warn of."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")  # of the theme, about the next version of mkdocs
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def article(site, name):
    """Returns the HTML of a page's text, without blocks of code."""
    text = (site / f"{name}.html").read_text(encoding="utf-8")
    body = text[text.index("<article") : text.index("</article>")]
    return re.sub(r"<pre.*?</pre>", "", body, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_looks_as_on_github(site, page):
    """Lists and tables need an empty line before them here, and nested blocks four columns."""
    shown = article(site, NAMES.get(str(page.relative_to(ROOT)), page.stem))
    tables = re.findall(r"^ *\|(?:[ :]*-+[ :]*\|)+ *$", without_code(page), flags=re.MULTILINE)
    assert shown.count("<table") == len(tables)
    for text in re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", shown, flags=re.DOTALL):
        plain = html.unescape(re.sub(r"<code>.*?</code>|<[^>]+>", "", text, flags=re.DOTALL))
        assert not re.search(r"^ *([-*|]|\d+\.) |```|\]\(", plain, flags=re.MULTILINE), plain


def test_the_notebook_and_the_changes_are_on_it(site):
    assert "Quickstart" in article(site, "quickstart")
    assert "0.1.0" in article(site, "changelog")


def test_links_of_the_repository_lead_to_pages_of_the_site(site):
    assert 'href="contributing.html"' in article(site, "pages")
    assert 'href="quickstart.html"' in article(site, "pages")
    assert 'href="contributing.html#where-files-are"' in article(site, "changelog")
    assert 'href="../' not in article(site, "inside")  # sources are not on the site
    assert "ops/attention/cpu.py" in article(site, "inside")
