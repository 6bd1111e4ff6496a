"""Finds the fastest constants of a kernel: candidates, the tournament between them, and
its journal.
"""
