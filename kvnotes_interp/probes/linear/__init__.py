"""Linear probes: where the conclusion can be read, held out by content, and whether the model uses it."""

from kvnotes_interp.probes.linear.decodability import fit_probe, linear_decodability
from kvnotes_interp.probes.linear.use import apply_probe

__all__ = ["apply_probe", "fit_probe", "linear_decodability"]
