"""This machine: its GPUs, compilers, locks and load, and the environment of a measurement."""
