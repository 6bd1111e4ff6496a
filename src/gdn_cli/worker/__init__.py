"""The process that judges kernels: it reads a request, checks, probes, times and replies."""
