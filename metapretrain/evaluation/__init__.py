"""Intervals, scores of representations and episodes, figures, and the report of a folder of runs."""
