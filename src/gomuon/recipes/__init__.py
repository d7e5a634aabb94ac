"""What a recipe is, the stations that methods share, what they cost, and the registry."""
