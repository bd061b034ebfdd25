"""What the promises of docs/reliability.md cost to break: one row a promise, tried by force.

python -m tests.torture [--share 0.03] [--seed 0] [row ...]
"""
