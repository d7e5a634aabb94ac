"""Several processes on one machine, talking through gloo."""
