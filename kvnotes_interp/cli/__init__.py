"""`kvprobe`: the same calls as in Python, from a terminal. Options have the same names as Python's keyword arguments.

Exit codes: 0 fine, 1 a control failed, 2 wrong use. Heavy imports stay inside functions so that --help is quick.
One file per kind of command: `probes.py` (one small function per probe), `library.py` (models, tasks, runs),
`compile.py` (documents to caches), `stream.py` (a text in a cache of constant size), `training.py` (training a Writer).
"""

from __future__ import annotations

import sys

from kvnotes_interp.cli import compile, library, probes, stream, training
from kvnotes_interp.cli.app import app
from kvnotes_interp.cli.printing import say
from kvnotes_interp.errors import KVNotesError
from kvnotes_interp.files import check_text

__all__ = ["app", "compile", "library", "main", "probes", "stream", "training"]


def main() -> None:
    """Entry point: errors raised on purpose become one message on standard error and an exit code."""
    try:
        for number, word in enumerate(sys.argv[1:], 1):
            check_text(word, f"word {number} of the command line")
        app()
    except KVNotesError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except OSError as error:  # a folder that cannot be written, a full disk
        say(f"error: {error}")
        sys.exit(2)
