"""Splice quality: what caches composed from chunks answer, how far they are from full recompute, and what they cost."""

from kvnotes_interp.probes.splicing.quality import splice_quality

__all__ = ["splice_quality"]
