"""Capture: second moments of each layer's inputs x and output gradients δ."""
