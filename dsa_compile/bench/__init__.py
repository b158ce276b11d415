"""Benchmarks that ``dsa-compile bench`` runs: each is the function of the module of its name."""
