"""The `afterglow` command: registers the subcommands and prints errors as one line on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from afterglow.cli import cache, chat, doctor, explain, models, run, serve
from afterglow.cli.error_messages import describe_error
from afterglow.errors import AfterglowError, Cancelled
from afterglow.version import __version__

app = typer.Typer(
    name="afterglow",
    help="Run language models locally. No token is computed twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat")(chat.chat)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("perplexity")(run.perplexity)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(cache.app, name="cache")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"afterglow {__version__}")
        raise typer.Exit


@app.callback()
def configure_logging(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the log of llama.cpp to standard error.")] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 error with a message, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except (KeyboardInterrupt, Cancelled):
        sys.exit(130)
    except AfterglowError as error:
        print(f"afterglow: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader closed the pipe, e.g. `head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
