"""`afterglow launch`: start a coding agent with everything it needs to use this server, and the server if none runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from afterglow.cli import options
from afterglow.cli.clients import CLIENTS, Client, Endpoint, Setup, get_client
from afterglow.cli.open_model import resolve_or_pull
from afterglow.cli.ps import build_url, collect_models, find_api_key, request_json
from afterglow.cli.serve import resolve_model_argument
from afterglow.cli.settings import ENVIRONMENT_PREFIX, Settings, load_command_settings
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.paths import get_data_directory

CONNECT_TIMEOUT_SECONDS = 2.0
POLL_SECONDS = 0.2
LOAD_TIMEOUT_SECONDS = 600.0
STOP_TIMEOUT_SECONDS = 40.0  # of a server with its shutdown time of 30 seconds
LOG_LINES = 5  # of a server that did not start, in the error
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1

ClientArgument = Annotated[str, typer.Argument(metavar="|".join(CLIENTS), help="Coding agent.", show_default=False)]
ClientArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the client.", show_default=False)
]


@options.accept_settings(["host", "port", "context"])
def launch(
    command: typer.Context,
    client: ClientArgument,
    arguments: ClientArguments = None,
    model: options.ModelOption = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server. Default: the first of AFTERGLOW_SERVER_API_KEYS.")
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the environment and the files as shell commands, and start nothing.")
    ] = False,
) -> None:
    """Start a coding agent on a local model.

    Uses the server that runs at the address of the settings; if there is none, starts one that ends with the client.
    Options stand before the name of the client, the arguments of the client after it: `afterglow launch claude -p Hi`.
    """
    target, settings = get_client(client), load_command_settings(command)
    session = LaunchSession(target, settings, model, api_key or find_api_key())
    if only_print:
        return print(format_shell(session.prepare(), target, arguments or ()))
    executable = find_executable(target)
    with session.serve():
        setup = session.prepare()
        for path, text in setup.files.items():
            write_private(path, text)
        status = run_client([executable, *setup.arguments, *(arguments or ())], setup.environment)
    sys.exit(status)


class LaunchSession:
    """The server of a client: an existing one, or one of its own."""

    def __init__(self, client: Client, settings: Settings, model: str | None, api_key: str | None) -> None:
        self._client, self._settings, self._model, self._api_key = client, settings, model, api_key
        self._port = settings.server.port or find_free_port(settings.server.host)
        self.url = build_url(settings.server.host, self._port)

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Use the running server, or run one inside the `with` block. Returns when its models are ready."""
        console = Console(stderr=True, highlight=False)
        if is_listening(self.url):
            with console.status(f"waiting for {self.url}"):
                wait_until_ready(self.url, self._api_key, None)
            yield
            return
        model = choose_model(self._settings)
        resolve_or_pull(resolve_model_argument(model, self._settings)[1])
        log_path = get_data_directory("launch") / f"server-{self._port}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("w") as log, run_server(model, self._build_server_environment(), log) as process:
            with console.status(f"starting a server with {model}, which logs to {log_path}"):
                wait_until_ready(self.url, self._api_key, process, log_path)
            yield

    def _build_server_environment(self) -> dict[str, str]:
        """Return the settings of the server that differ from those of this command."""
        settings, context = self._settings, self._settings.load_options["context"]
        values: dict[str, Any] = {"SERVER_HOST": settings.server.host, "SERVER_PORT": self._port, "CONTEXT": context}
        if "context" not in settings.model_fields_set and context is not None:
            values["CONTEXT"] = max(context, self._client.min_context_tokens)
        return {ENVIRONMENT_PREFIX + name: str(value) for name, value in values.items() if value is not None}

    def prepare(self) -> Setup:
        """Return what the client needs. Raises an error if the model is not suitable for it.

        If no server runs, which only happens if nothing is started, the numbers are those of the settings.
        """
        directory = get_data_directory("launch") / f"{self._client.name}-{self._port}"
        if is_listening(self.url):
            name, context = self._select_model(collect_models(self.url, self._api_key))
        else:
            name, _ = resolve_model_argument(choose_model(self._settings), self._settings)
            context = int(self._build_server_environment().get(f"{ENVIRONMENT_PREFIX}CONTEXT", 0))
            context = self._settings.get_model_table(name).load_options.get("context") or context
            context = context or self._client.min_context_tokens
        check_context(self._client, name, context)
        endpoint = Endpoint(
            url=self.url, model=name, context_tokens=context, api_key=self._api_key, directory=directory
        )
        return self._client.build_setup(endpoint)

    def _select_model(self, rows: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
        """Return the name and the context of the model to use."""
        names = [row["name"] for row in rows]
        name = names[0] if self._model is None else resolve_model_argument(self._model, self._settings)[0]
        if name not in names:
            reason = f"{name!r} is not served at {self.url}; served are {', '.join(names)}. Use another --port"
            raise InvalidArgument("--model", reason)
        # A model that is loaded by its first request is loaded now.
        request_json(self.url, "/tokenize", self._api_key, {"model": name, "content": ""}, LOAD_TIMEOUT_SECONDS)
        card = request_json(self.url, f"/v1/models/{quote(name)}", self._api_key)
        if self._client.needs_tools and "chat" not in card["capabilities"]:
            reason = f"{name!r} cannot call tools, which {self._client.title} needs: it generates no chat responses"
            raise InvalidArgument("--model", reason)
        return name, card["context_length"]


def choose_model(settings: Settings) -> str:
    """Return the model to serve: the one that is set, otherwise the first model table, otherwise the default model."""
    return settings.model if "model" in settings.model_fields_set else next(iter(settings.models), settings.model)


def check_context(client: Client, model: str, context: int) -> None:
    """Raise an error if the context is too small for the first prompt of a client."""
    if context < client.min_context_tokens:
        numbers = f"{context:,} tokens, but {client.title} needs {client.min_context_tokens:,}"
        raise InvalidArgument("--context", f"of {model!r} is {numbers}: serve it with a larger one, or another model")


def find_executable(client: Client) -> str:
    """Return the path of the executable of a client."""
    if (path := shutil.which(client.name)) is None:
        raise AfterglowError(f"{client.title} is not installed (no `{client.name}` on the PATH): {client.install}")
    return path


# --- output of `--print`


def format_shell(setup: Setup, client: Client, arguments: Sequence[str]) -> str:
    """Return shell commands that write the files and set the environment; the last line, a comment, starts the client.

    >>> print(format_shell(Setup(environment={"A": "two words"}), get_client("codex"), ["exec", "Say hi"]))
    export A='two words'
    # codex exec 'Say hi'
    """
    lines = []
    for path, text in setup.files.items():
        lines.append(f"mkdir -p {shlex.quote(str(path.parent))}")
        lines.append(f"printf %s {shlex.quote(text)} > {shlex.quote(str(path))}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in setup.environment.items()]
    return "\n".join([*lines, f"# {shlex.join([client.name, *setup.arguments, *arguments])}"])


def write_private(path: Path, text: str) -> None:
    """Write a file that only the user can read: it may contain an API key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


# --- server


def find_free_port(host: str) -> int:
    """Return a free port."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def is_listening(url: str) -> bool:
    """Return whether a server accepts connections."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def run_server(model: str, environment: Mapping[str, str], log: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `afterglow serve` inside the `with` block, in a session of its own: Ctrl-C is for the client."""
    process = subprocess.Popen(
        [sys.executable, "-m", "afterglow.cli.main", "serve", model],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Let the kernel end the server if this process is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_until_ready(
    url: str, api_key: str | None, process: subprocess.Popen[bytes] | None, log_path: Path | None = None
) -> None:
    """Wait until all models of a server are loaded. `process` is the server if it is ours."""
    deadline = time.monotonic() + LOAD_TIMEOUT_SECONDS
    while True:
        try:
            if process is None or is_listening(url):
                health = request_json(url, "/health", api_key, timeout_seconds=LOAD_TIMEOUT_SECONDS)
                if health["status"] == "ok":
                    return
        except AfterglowError:
            if process is None:
                raise  # our own server may be about to end, with the reason in its log
        if process is not None and process.poll() is not None:
            assert log_path is not None
            raise AfterglowError(
                "the server did not start: " + " ".join(log_path.read_text().splitlines()[-LOG_LINES:])
            )
        if time.monotonic() > deadline:
            raise AfterglowError(f"the server at {url} was not ready within {LOAD_TIMEOUT_SECONDS:,.0f} s")
        time.sleep(POLL_SECONDS)


# --- client


def run_client(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a client in the foreground and return its exit status; 128 and the signal if one ended it.

    The terminal sends Ctrl-C to the client itself. Signals to this process are forwarded.
    """
    process = subprocess.Popen(command, env={**os.environ, **environment})

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    handlers = {signal.SIGINT: lambda number, frame: None, **dict.fromkeys(FORWARDED_SIGNALS, forward)}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
