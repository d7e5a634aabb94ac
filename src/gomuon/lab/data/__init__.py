"""The texts that the character models are trained on: found, downloaded and verified."""
