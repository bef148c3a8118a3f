"""Figures of speed, each beside a plain baseline of the same run: `python -m tests.benchmarks`."""
