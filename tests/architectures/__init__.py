"""Architectures that people train, small and random. Nothing is fetched."""

import tests.integrations  # noqa: F401  so that a torchvision of another torch can be imported
