"""Checkpoints: what is saved, how a checkpoint is checked, and how it is loaded."""
