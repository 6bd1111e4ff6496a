"""From options to results: the plan, its jobs, the workers that run them, and the proof
of a packed file.
"""
