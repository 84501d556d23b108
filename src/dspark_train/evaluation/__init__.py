"""Benchmark suites, baselines, ablations, and the report of a run."""
