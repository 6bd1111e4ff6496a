"""What there is: ops, algos, workloads, presets, timing tiers, and how an algo is packed."""
