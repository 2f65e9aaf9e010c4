"""Downloads one source archive with pip's configuration: `python fetch_child.py NAME VERSION FILE`.

`pip download` would build the archive's metadata, which takes half a minute and build tools. This script uses pip's
internal finder and session, which are isolated in this file and in a child process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pip._internal.commands import create_command

CHUNK_BYTES = 1 << 20


def main(name: str, version: str, destination: Path) -> None:
    command = create_command("download")
    with command.main_context():
        options, _ = command.parse_args(["--no-binary", ":all:", "--quiet", "--no-input"])
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        links = [candidate.link for candidate in finder.find_all_candidates(name) if str(candidate.version) == version]
        if not links:
            sys.exit(f"pip finds no source archive of {name} {version}; see `pip config list`")
        response = session.get(links[0].url_without_fragment, stream=True)
        response.raise_for_status()
        with destination.open("wb") as output:
            for chunk in response.iter_content(CHUNK_BYTES):
                output.write(chunk)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
