"""Child process of `export`: reads jobs as JSON from standard input and draws each with kaleido.

It is run as a script, so it imports nothing of this package. Kaleido passes --no-sandbox to Chromium by itself, which
root needs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def draw(jobs: list[dict[str, Any]]) -> None:
    """Draw every job with one browser; a picture that fails does not stop the others."""
    import kaleido

    failed: Exception | None = None
    # Without mathjax=False kaleido's page asks a server for it.
    async with kaleido.Kaleido(n=1, mathjax=False) as renderer:
        for job in jobs:
            try:
                options = {"format": job["format"], "scale": job["scale"] if job["format"] == "png" else 1}
                data = await renderer.calc_fig(json.loads(job["figure"]), opts=options)  # type: ignore[arg-type]
                Path(job["path"]).write_bytes(data)
            except Exception as error:  # reported below, after the other pictures
                failed = error
    if failed is not None:
        raise failed


if __name__ == "__main__":
    asyncio.run(draw(json.load(sys.stdin)))
