"""The catalog: ops, algos, workloads, presets, timing tiers, and how an algo is packed."""
