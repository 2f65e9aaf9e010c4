"""`afterglow ps`: the models of a running server, with their requests."""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from afterglow.api.options import parse_list
from afterglow.cli import options
from afterglow.cli.settings import load_command_settings
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.server.settings import KEY_DIGEST_PREFIX

TIMEOUT_SECONDS = 10
COLUMNS = ("name", "state", "context", "running", "waiting", "restarts")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@options.accept_settings(["host", "port"])
def ps(
    command: typer.Context,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server. Default: the first of AFTERGLOW_SERVER_API_KEYS.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models of the running server: load state, context length, requests and restarts."""
    settings = load_command_settings(command).server
    rows = collect_models(build_url(settings.host, settings.port), api_key or find_api_key())
    if as_json:
        typer.echo(json.dumps(rows))
    elif not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(str(row[column]) for column in COLUMNS))
    else:
        table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(str(row[column]) for column in COLUMNS))
        Console().print(table, markup=False)


def build_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on an address.

    >>> build_url("0.0.0.0", 8080), build_url("::1", 8080)
    ('http://127.0.0.1:8080', 'http://[::1]:8080')
    """
    host = ANY_ADDRESS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def collect_models(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Ask the server for its models. A model that is not loaded has no numbers."""
    cards = request_json(url, "/v1/models", api_key)["data"]
    states = request_json(url, "/health", api_key)["models"]
    stats = request_json(url, "/stats", api_key)["models"]
    rows = []
    for card in cards:
        name, numbers = card["id"], stats.get(card["id"], {})
        choices = numbers.get("choices", {})
        rows.append(
            {
                "name": name,
                "state": states.get(name, "unknown"),
                "context": card["context_length"] or "-",
                "running": choices.get("in_flight", 0) - choices.get("waiting", 0),
                "waiting": choices.get("waiting", 0),
                "restarts": numbers.get("restarts", 0),
            }
        )
    return rows


def find_api_key() -> str | None:
    """Return the first key of the server's environment variable. Settings have digests only, which cannot be sent."""
    keys = parse_list(os.environ.get("AFTERGLOW_SERVER_API_KEYS", ""))
    return next((key for key in keys if key and not key.startswith(KEY_DIGEST_PREFIX)), None)


def request_json(
    url: str,
    path: str,
    api_key: str | None,
    content: Mapping[str, Any] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Return the JSON body of a response; with `content`, to a POST request. The status 503 of a server that is
    starting has one as well."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    data = None if content is None else json.dumps(content).encode()
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is no web site
        with opener.open(urllib.request.Request(url + path, data, headers), timeout=timeout_seconds) as response:
            body: dict[str, Any] = json.loads(response.read())
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise InvalidArgument("--api-key", f"is not a key of the server at {url}") from None
        if error.code != 503 or path != "/health":
            raise AfterglowError(f"{url} is not an afterglow server: {path} has status {error.code}") from None
        body = json.loads(error.read())
    except (http.client.InvalidURL, UnicodeEncodeError) as error:
        raise AfterglowError(f"the request to {url}{path} cannot be sent: {error}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise AfterglowError(f"no server at {url} ({reason}): start one with `afterglow serve`") from None
    return body
