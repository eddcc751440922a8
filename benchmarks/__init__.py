"""Benchmark suites. A suite records a row only if the results that it timed pass a numerical check."""
