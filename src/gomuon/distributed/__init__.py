"""Several ranks, one optimizer: who computes what, what is sent, and what all ranks agree on."""
