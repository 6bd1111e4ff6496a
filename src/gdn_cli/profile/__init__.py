"""What limits a kernel: run a profiler, draw a verdict from its figures, compare two profiles."""
