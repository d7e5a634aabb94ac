"""Watching an optimizer: what it measures of each layer, and what looks wrong."""
