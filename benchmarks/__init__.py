"""Benchmarks of django_pgstreams: `python -m benchmarks NAME`."""
