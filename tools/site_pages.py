"""A hook of mkdocs that adds the pages which stand beside docs to the site."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {name.lower(): name for name in ("CHANGELOG.md", "SECURITY.md")}
"""The files of the repository, by their names on the site."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to those of docs."""
    for page, name in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files
