"""What holds a kernel back: run a profiler, judge what it found, compare two profiles."""
