"""Child process of hub.py: lists, describes, searches and downloads on a Hugging Face hub.

Prints its result as JSON to stdout, or one line to stderr on failure. Must not import afterglow, so that it loads only
the hub's library.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status

PARENT_POLL_SECONDS = 0.5
CHUNK_BYTES = 1 << 20  # lost in a break; the library's 10 MiB would also show no progress of small files


def print_file_info(repository: str, revision: str, file: str) -> None:
    """Print sha256, size and commit of a file as JSON: `print_file_info("owner/repo", "main", "model.gguf")`."""
    metadata = get_hf_file_metadata(hf_hub_url(repository, file, revision=revision))
    print(json.dumps({"sha256": metadata.etag, "size": metadata.size, "commit": metadata.commit_hash or revision}))


def print_files(repository: str, revision: str) -> None:
    """Print the commit and the GGUF files of a repository as JSON: `print_files("owner/repo", "main")`."""
    info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    files = [
        {"path": file.rfilename, "size": file.size, "sha256": file.lfs.sha256 if file.lfs else None}
        for file in info.siblings or ()
        if file.rfilename.endswith(".gguf")
    ]
    print(json.dumps({"commit": info.sha, "files": files}))


def print_matches(words: str, limit: str) -> None:
    """Print the matching repositories with GGUF files, most downloaded first: `print_matches("qwen3", "20")`."""
    # Without `HfApi.list_models`, which repeats its request for half a minute if this machine is offline.
    query = {"search": words, "filter": "gguf", "sort": "downloads", "direction": "-1", "limit": limit}
    response = get_session().get(f"{constants.ENDPOINT}/api/models", params=query, headers=build_hf_headers())
    hf_raise_for_status(response)
    found = []
    for match in response.json():
        licence = next((tag.partition(":")[2] for tag in match.get("tags", ()) if tag.startswith("license:")), None)
        access = {"licence": licence, "gated": bool(match.get("gated"))}
        found.append({"name": match["id"], "downloads": match.get("downloads"), **access})
    print(json.dumps(found))


def download_head(repository: str, revision: str, file: str, folder: str, nbytes: str) -> None:
    """Write the first bytes of a file to a sparse file of its size: `download_head("o/r", "main", "f", ".", "9")`."""
    url = hf_hub_url(repository, file, revision=revision)
    size = get_hf_file_metadata(url).size
    if size is None:
        raise ValueError("the hub does not report the size of this file")
    last = min(int(nbytes), size) - 1
    response = get_session().get(url, headers={**build_hf_headers(), "Range": f"bytes=0-{last}"})
    hf_raise_for_status(response)
    path = Path(folder, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        target.write(response.content[: last + 1])
        target.truncate(size)


def download(repository: str, revision: str, file: str, folder: str, sha256: str, size: str) -> None:
    """Download a file to `folder`/complete; continue after the bytes of an earlier download in `folder`/part.

    `hf_hub_download` starts a new file for each process, so the bytes are fetched with the library's `http_get`.
    """
    url = hf_hub_url(repository, file, revision=revision)
    metadata = get_hf_file_metadata(url)
    for name, expected, reported in (("sha256", sha256, metadata.etag), ("bytes", size, str(metadata.size))):
        if expected and reported != expected:
            raise ValueError(f"the hub contradicts itself: {expected} {name} at first, then {reported}")
    part, complete = Path(folder, "part"), Path(folder, "complete")
    if complete.exists() and complete.stat().st_size == metadata.size:
        return  # an earlier process ended before it could use the file
    if metadata.size is not None and metadata.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        os.replace(hf_hub_download(repository, file, revision=revision, local_dir=folder), complete)
        return
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    headers = build_hf_headers()
    if urlparse(metadata.location).netloc != urlparse(url).netloc:
        headers.pop("authorization", None)  # a storage host must not see the token
    try:
        with part.open("ab", buffering=0) as target:
            http_get(metadata.location, target, resume_size=target.tell(), headers=headers, expected_size=metadata.size)
            os.fsync(target.fileno())  # the rename may become durable before the data
    except OSError as error:
        if "Consistency check failed" not in str(error):
            raise
        sent = part.stat().st_size
        part.unlink()  # to continue it would fail again
        raise ValueError(f"the hub reported {metadata.size:,} bytes and sent {sent:,}") from error
    os.replace(part, complete)


ACTIONS: dict[str, Callable[..., None]] = {
    "describe": print_file_info,
    "list": print_files,
    "search": print_matches,
    "head": download_head,
    "download": download,
}


def format_error(error: Exception, repository: str, revision: str = "", file: str = "", *_: str) -> str:
    """Return the error and its remedy in one line: `format_error(error, "owner/repo", "main", "model.gguf")`."""
    # Queries are removed: those of URLs issued by the hub contain signatures.
    message = re.sub(r"\?[^\s']+", "", next(iter(str(error).splitlines()), ""))
    page = f"{constants.ENDPOINT}/{repository}"
    remedies: dict[type[Exception], str] = {  # subclasses first
        GatedRepoError: f"{repository} is gated: accept its terms on {page}, then run `hf auth login` or set HF_TOKEN",
        RepositoryNotFoundError: f"the hub has no repository {repository}, or it is private (then set HF_TOKEN)",
        RevisionNotFoundError: f"{repository} has no revision {revision}",
        OfflineModeIsEnabled: "the hub's library is in offline mode: unset HF_HUB_OFFLINE",
        LocalEntryNotFoundError: f"the hub at {constants.ENDPOINT} does not answer: is this machine offline?",
        EntryNotFoundError: f"{repository} has no file {file} at revision {revision}",
        HfHubHTTPError: f"the hub reports: {message}",
        ValueError: message,
    }
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return format_error(
            error.__cause__, repository, revision, file
        )  # it is raised if a request fails for any reason
    offline = f"{type(error).__name__}: {message} (is this machine offline? the hub is {constants.ENDPOINT})"
    return next((remedy for kind, remedy in remedies.items() if isinstance(error, kind)), offline)


def exit_with_parent() -> None:
    """End this process after its parent was killed: nobody would use the download."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def main(action: str, *arguments: str) -> int:
    """Run one action and return the exit status: `main("list", "owner/repo", "main")`."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        ACTIONS[action](*arguments)
    # All exceptions: the library has used three HTTP libraries, each with its own exception classes.
    except Exception as error:
        print(format_error(error, *arguments), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
