"""From options to results: the plan, its jobs, the workers that carry them out, and the proof of a packed file."""
