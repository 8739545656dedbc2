"""What all benchmarks share; how to use it is told in `benchmarks`."""
