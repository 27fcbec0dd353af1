"""Filled by the first landing."""
