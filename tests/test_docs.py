"""Documentation names what exists: links between pages, and paths of the repository in backticks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FOLDERS = ("engine", "models", "topology", "launchers", "tools", "tests", "configs", "docs")


def missing(page: Path) -> list[str]:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    return [x for x in links if not (page.parent / x).exists()] + [x for x in paths if not (ROOT / x).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    assert missing(page) == []


def test_a_missing_link_and_path_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](gone.md) `engine/gone.py` `engine/request.py` [b](page.md)")
    assert missing(page) == ["gone.md", "engine/gone.py"]
