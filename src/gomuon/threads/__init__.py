"""Threads: small matrices side by side, and torch's thread count for one thread only."""
