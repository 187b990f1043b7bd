"""What a probe returns: a tidy table, its summary with the controls, and the manifest of the run.

Importing this package loads neither pandas nor plotly; they come with the first result.
"""

from kvnotes_interp.results.result import Result
from kvnotes_interp.results.run import Run
from kvnotes_interp.results.summary import Control, Summary

__all__ = ["Control", "Result", "Run", "Summary"]
