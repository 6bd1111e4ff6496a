"""This machine: its GPUs, compilers, locks and load, and where a number was measured."""
