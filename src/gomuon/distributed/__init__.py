"""Several ranks: which rank computes which matrix, what is sent, and what ranks compare."""
