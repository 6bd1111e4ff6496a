"""Judges an algo: its inputs, the check, the probes, and a task for each command."""
