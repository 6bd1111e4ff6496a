"""Measured data: documents of commands, comparisons, statistics and the history."""
