"""Read runs and campaigns back from disk, and compute what they show."""
