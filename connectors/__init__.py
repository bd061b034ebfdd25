"""The only places that import an engine."""
