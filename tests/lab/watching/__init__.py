"""Tests of `gomuon watch`."""
