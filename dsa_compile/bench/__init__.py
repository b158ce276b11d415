"""Benchmarks that ``dsa-compile bench`` runs, one module and one function of its name for each."""
