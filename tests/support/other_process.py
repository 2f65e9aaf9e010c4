"""Changes to a disk tier by another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1]


def run_python(code: str, *arguments: object) -> str:
    """Run Python code in another process, with the arguments as `sys.argv[1:]`, and return its output."""
    preamble = f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(SUPPORT)!r})\n"
    command = [sys.executable, "-c", preamble + code, *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stderr
    return child.stdout


def clear(folder: Path) -> None:
    """Do what `afterglow cache clear` does."""
    run_python("from afterglow.engine.inspect import disk\ndisk.clear(Path(sys.argv[1]))", folder)
