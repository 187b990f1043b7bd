"""Still: amortised compaction of a cache by a small Perceiver per layer, once or again and again over a stream."""

from kvnotes_interp.operators.still.attribution import attribution
from kvnotes_interp.operators.still.compactor import Still, new_still
from kvnotes_interp.operators.still.settings import StillSettings
from kvnotes_interp.operators.still.stream import passes, stream

__all__ = ["Still", "StillSettings", "attribution", "new_still", "passes", "stream"]
