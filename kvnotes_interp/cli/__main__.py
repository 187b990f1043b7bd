"""`python -m kvnotes_interp.cli` is `kvprobe`."""

from kvnotes_interp.cli import main

main()
