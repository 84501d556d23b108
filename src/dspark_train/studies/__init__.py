"""Studies of recorded rounds: acceptance, thresholds, drift, the target's throughput, and load simulation."""
