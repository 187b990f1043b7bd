"""Compact caches under test: what they still answer, and what in them survives."""

from kvnotes_interp.probes.compaction.quality import compaction_quality
from kvnotes_interp.probes.compaction.survival import compaction_survival

__all__ = ["compaction_quality", "compaction_survival"]
