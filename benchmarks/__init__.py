"""Benchmarks: commands anyone can run; ratios are taken side by side in one run."""
