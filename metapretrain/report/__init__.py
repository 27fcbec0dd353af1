"""Reports: the results of many runs as tables, notes and plots."""
