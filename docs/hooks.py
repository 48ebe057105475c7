"""Hooks of mkdocs: the site has the pages of docs/, those of the repository's root, and the notebook.

In the repository these link to each other by relative paths; on the site the links lead to the same pages.
"""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
#: Pages that have another name on the site, or are not in docs/.
RENAMED = {
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    DOCS / "README.md": "pages.md",
    DOCS / "quickstart.ipynb": "quickstart.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that have another name, in the place of those in docs/."""
    for path, name in RENAMED.items():
        if path.parent == DOCS:
            files.remove(files.src_uris[path.name])
        if path.suffix == ".ipynb":
            files.append(File.generated(config, name, content=markdown_of(path)))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def markdown_of(notebook: Path) -> str:
    """Returns the cells of a notebook as a page, whose code stands in blocks."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links lead to where pages are on the site; of those to sources, which it lacks, the text stays."""
    source = page.file.abs_src_path
    folder = Path(source).parent if source else DOCS

    def on_site(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        target = (folder / path).resolve()
        if target in RENAMED:
            return f"[{text}]({RENAMED[target]}{anchor})"
        if target.is_relative_to(DOCS):
            return f"[{text}]({target.relative_to(DOCS)}{anchor})"
        return text if target.exists() else link[0]

    return re.sub(r"\[([^\[\]]*)\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)", on_site, markdown)
