"""What was measured: the document of a command, comparisons, scores, statistics and the history."""
