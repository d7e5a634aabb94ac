"""A model's parameters: how each is treated, and how it is cut into matrices."""
