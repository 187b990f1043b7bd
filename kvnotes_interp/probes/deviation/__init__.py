"""Attention deviation: how the blocks of a composed cache are read, edge against interior."""

from kvnotes_interp.probes.deviation.maps import attention_deviation

__all__ = ["attention_deviation"]
