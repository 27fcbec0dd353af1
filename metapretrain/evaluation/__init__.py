"""Intervals, metrics, and the evaluation of representations, episodes and robustness."""
