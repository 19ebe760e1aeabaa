"""Test modules are imported by their bare names, wherever they lie: the folders for sys.path, and for a child's
PYTHONPATH.

`python folders.py` prints them, for mypy.
"""

from __future__ import annotations

import os
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_PACKAGES = ("cluster", "faults", "golden", "fixtures")
FOLDERS = sorted(
    {str(file.parent) for file in _TESTS.glob("*/**/*.py") if file.relative_to(_TESTS).parts[0] not in _PACKAGES}
)
FOLDERS.append(str(_TESTS))

if __name__ == "__main__":
    print(os.pathsep.join(FOLDERS))
