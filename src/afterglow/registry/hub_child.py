"""Run as a program by hub.py: asks a Hugging Face hub about one file, or downloads it. One line on stderr if it cannot.

Imports nothing of afterglow, so that starting it costs only the hub's own library.
"""

from __future__ import annotations

import json
import re
import sys

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


def print_file_info(repository: str, revision: str, file: str) -> None:
    """Print what the hub says of the file as one line of JSON: `describe("owner/repo", "main", "model.gguf")`."""
    facts = get_hf_file_metadata(hf_hub_url(repository, file, revision=revision))
    print(json.dumps({"sha256": facts.etag, "size": facts.size, "commit": facts.commit_hash or revision}))


def format_error(error: Exception, repository: str, revision: str, file: str) -> str:
    """Say in one line what went wrong and what to do: `complaint(error, "owner/repo", "main", "model.gguf")`."""
    # Without queries: those of addresses that the hub hands out are signatures.
    said = re.sub(r"\?[^\s']+", "", next(iter(str(error).splitlines()), ""))
    match error:
        case GatedRepoError():
            return f"{repository} is gated: accept its terms on the hub, then set HF_TOKEN"
        case RepositoryNotFoundError():
            return f"the hub has no repository {repository}, or it is private (then set HF_TOKEN)"
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision}"
        case OfflineModeIsEnabled():
            return "the hub's library is told to stay offline: unset HF_HUB_OFFLINE"
        case LocalEntryNotFoundError():  # what the library says when it could not ask, for whatever reason
            if isinstance(error.__cause__, Exception):
                return format_error(error.__cause__, repository, revision, file)
            return f"the hub at {constants.ENDPOINT} does not answer: is this machine offline?"
        case EntryNotFoundError():
            return f"{repository} has no file {file} at revision {revision}"
        case HfHubHTTPError():
            return f"the hub says: {said}"
    return f"{type(error).__name__}: {said} (is this machine offline? the hub is {constants.ENDPOINT})"


def main(action: str, repository: str, revision: str, file: str, folder: str) -> int:
    """Do one action and give the exit status: `main("download", "owner/repo", "main", "model.gguf", folder)`."""
    try:
        if action == "describe":
            print_file_info(repository, revision, file)
        else:
            hf_hub_download(repository, file, revision=revision, local_dir=folder)
    # Everything: the library has had three HTTP libraries under it, each with its own tree of errors.
    except Exception as error:
        print(format_error(error, repository, revision, file), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
