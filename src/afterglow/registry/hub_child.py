"""Child process of hub.py: describes or downloads one file of a Hugging Face hub, or only its first bytes.

Prints one line to stderr on failure. Must not import afterglow, so that it loads only the hub's library.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status


def print_file_info(repository: str, revision: str, file: str) -> None:
    """Print sha256, size and commit of a file as JSON: `print_file_info("owner/repo", "main", "model.gguf")`."""
    metadata = get_hf_file_metadata(hf_hub_url(repository, file, revision=revision))
    print(json.dumps({"sha256": metadata.etag, "size": metadata.size, "commit": metadata.commit_hash or revision}))


def download_head(repository: str, revision: str, file: str, folder: str, nbytes: int) -> None:
    """Write the first bytes of a file to a sparse file of its size: `download_head("o/r", "main", "f", ".", 9)`."""
    url = hf_hub_url(repository, file, revision=revision)
    size = get_hf_file_metadata(url).size
    if size is None:
        raise ValueError("the hub does not report the size of this file")
    response = get_session().get(url, headers={**build_hf_headers(), "Range": f"bytes=0-{min(nbytes, size) - 1}"})
    hf_raise_for_status(response)
    path = Path(folder, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        target.write(response.content[:nbytes])
        target.truncate(size)


def format_error(error: Exception, repository: str, revision: str, file: str) -> str:
    """Return the error and its remedy in one line: `format_error(error, "owner/repo", "main", "model.gguf")`."""
    # Queries are removed: those of URLs issued by the hub contain signatures.
    message = re.sub(r"\?[^\s']+", "", next(iter(str(error).splitlines()), ""))
    match error:
        case GatedRepoError():
            return f"{repository} is gated: accept its terms on the hub, then set HF_TOKEN"
        case RepositoryNotFoundError():
            return f"the hub has no repository {repository}, or it is private (then set HF_TOKEN)"
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision}"
        case OfflineModeIsEnabled():
            return "the hub's library is in offline mode: unset HF_HUB_OFFLINE"
        case LocalEntryNotFoundError():  # raised if the request failed for any reason
            if isinstance(error.__cause__, Exception):
                return format_error(error.__cause__, repository, revision, file)
            return f"the hub at {constants.ENDPOINT} does not answer: is this machine offline?"
        case EntryNotFoundError():
            return f"{repository} has no file {file} at revision {revision}"
        case HfHubHTTPError():
            return f"the hub reports: {message}"
    return f"{type(error).__name__}: {message} (is this machine offline? the hub is {constants.ENDPOINT})"


def main(action: str, repository: str, revision: str, file: str, folder: str, nbytes: str = "0") -> int:
    """Run one action and return the exit status: `main("download", "owner/repo", "main", "model.gguf", folder)`."""
    try:
        if action == "describe":
            print_file_info(repository, revision, file)
        elif action == "head":
            download_head(repository, revision, file, folder, int(nbytes))
        else:
            hf_hub_download(repository, file, revision=revision, local_dir=folder)
    # All exceptions: the library has used three HTTP libraries, each with its own exception classes.
    except Exception as error:
        print(format_error(error, repository, revision, file), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
