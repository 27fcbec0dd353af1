"""Four ways to run the inner loop, with one result."""
