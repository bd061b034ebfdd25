"""Set-up of the environments and models that tests, demo and benchmarks use."""
