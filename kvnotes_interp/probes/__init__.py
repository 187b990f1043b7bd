"""Probes: a table over interventions x readouts, with its controls. One probe, one small file."""

from kvnotes_interp.probes.concentration import suffix_concentration
from kvnotes_interp.probes.editing import edit_frontier
from kvnotes_interp.probes.patching import local_patching

__all__ = ["edit_frontier", "local_patching", "suffix_concentration"]
