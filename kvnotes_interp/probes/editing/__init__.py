"""Edits of the cache held against a prefill of the new prompt: at once, after some thought, and over many turns."""

from kvnotes_interp.probes.editing.frontier import Arm, arms_of, edit_frontier

__all__ = ["Arm", "arms_of", "edit_frontier"]
