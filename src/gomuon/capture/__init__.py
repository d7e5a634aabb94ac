"""What a model's layers see: inputs x and output gradients δ, as second moments."""
