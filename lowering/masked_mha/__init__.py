"""Attention over expanded keys and values under a mask of bits, on CUDA. No op: ``dsa::prefill_mla`` runs it."""
