"""Helpers for training libraries. Each module needs its library and is imported by name."""
