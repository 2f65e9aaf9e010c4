"""How tests are divided between processes."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

# Its long variants take longer than those of all other files.
DIVIDED_FILE = "tests/laws/test_state_machine_on_llama.py"


class FileScheduling(LoadFileScheduling):
    """Give each file to one process, except the tests of the divided file."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(DIVIDED_FILE) else super()._split_scope(nodeid)
