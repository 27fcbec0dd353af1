"""Texts: several tasks in one encoder."""
