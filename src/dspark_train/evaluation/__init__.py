"""Benchmark suites, baselines and ablations, with their records and intervals."""
