"""A model's parameters: which optimizer treats each, and how it is cut into matrices."""
