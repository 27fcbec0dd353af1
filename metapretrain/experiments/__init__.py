"""Experiments: what a benchmark script runs, on one skeleton."""
