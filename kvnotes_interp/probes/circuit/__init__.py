"""Circuit ablation: the heads that write the note and those that read it, by knock-out, patching and exchange."""

from kvnotes_interp.probes.circuit.ablation import ANALYSES, circuit_ablation
from kvnotes_interp.probes.circuit.dissociation import dissociation

__all__ = ["ANALYSES", "circuit_ablation", "dissociation"]
