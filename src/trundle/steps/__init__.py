"""Ways to make a model smaller, one file each."""
