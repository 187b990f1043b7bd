"""Probes: a table over interventions x readouts, with its controls. One probe, one small file or folder."""

from kvnotes_interp.probes.circuit import circuit_ablation, dissociation
from kvnotes_interp.probes.compaction import compaction_quality, compaction_survival
from kvnotes_interp.probes.concentration import suffix_concentration
from kvnotes_interp.probes.deviation import attention_deviation
from kvnotes_interp.probes.editing import edit_frontier
from kvnotes_interp.probes.keystone import edit_in_splice
from kvnotes_interp.probes.linear import apply_probe, fit_probe, linear_decodability
from kvnotes_interp.probes.patching import local_patching
from kvnotes_interp.probes.splicing import splice_quality

__all__ = [
    "apply_probe",
    "attention_deviation",
    "circuit_ablation",
    "compaction_quality",
    "compaction_survival",
    "dissociation",
    "edit_frontier",
    "edit_in_splice",
    "fit_probe",
    "linear_decodability",
    "local_patching",
    "splice_quality",
    "suffix_concentration",
]
