"""The experiments that the benchmark scripts run, on one skeleton."""
