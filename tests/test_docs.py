"""Documentation names what exists: pages, sections, and files and tests of the repository in backticks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FOLDERS = ("engine", "models", "topology", "launchers", "tools", "tests", "configs", "docs")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".c", ".h")]
NAMES = {path.name for path in SOURCES}
TESTS = {
    name
    for path in SOURCES
    if path.name.startswith("test_")
    for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
}


def anchors(page: Path) -> set[str]:
    """The sections of a page, as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def missing(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = []
    for link, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        target = page.parent / link if link else page
        if not target.exists() or (section and section not in anchors(target)):
            found.append(f"{link}#{section}" if section else link)
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    found += [path for path in paths if not (ROOT / path).exists()]
    found += [name for name in re.findall(r"`(\w+\.(?:py|c|h))`", text) if name not in NAMES]
    return found + [name for name in re.findall(r"`(test_\w+)`", text) if name not in TESTS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_names_exist(page: Path) -> None:
    assert missing(page) == []


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The page\n[a](gone.md) [b](page.md#gone) [c](#the-page) [d](page.md) `engine/gone.py` `engine/request.py` "
        "`gone.c` `request.py` `test_gone` `test_links_and_names_exist`"
    )
    assert missing(page) == ["gone.md", "page.md#gone", "engine/gone.py", "gone.c", "test_gone"]
