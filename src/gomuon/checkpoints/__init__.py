"""Checkpoints: what is saved, what fits an optimizer, and how it comes back."""
