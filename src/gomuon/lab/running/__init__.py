"""Carry out a plan: train runs in worker processes, save checkpoints, continue after a stop."""
