"""Threads: small matrices in parallel, and torch's thread count for one thread only."""
