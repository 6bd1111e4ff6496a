"""Measured data: documents of commands, comparisons, scores, statistics and the history."""
