"""Entry point of the `afterglow` command. Prints errors as one line on standard error.

`--version` and shell completion import nothing but the standard library, so that they respond at once.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys

from afterglow.cli.completion import print_completions
from afterglow.cli.error_messages import describe_error
from afterglow.errors import AfterglowError, Cancelled
from afterglow.version import __version__


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 error with a message, 2 wrong usage, 130 interrupted."""
    if sys.argv[1:] == ["--version"]:
        return print(f"afterglow {__version__}")
    if print_completions():
        return
    replace_unwritable_characters()
    gc.disable()  # nothing becomes garbage while modules are imported; `load_command` enables it
    try:
        importlib.import_module("afterglow.cli.commands").app()
    except (KeyboardInterrupt, Cancelled):
        sys.exit(130)
    except AfterglowError as error:
        print(f"afterglow: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader closed the pipe, e.g. `head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left cannot be written either
        print(f"afterglow: {error}", file=sys.stderr)
        sys.exit(1)


def replace_unwritable_characters() -> None:
    """Print `?` for characters that the encoding of a stream lacks, e.g. an emoji in a terminal with Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
