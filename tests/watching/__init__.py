"""Tests of watching."""
