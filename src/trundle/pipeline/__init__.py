"""From a recipe to a model."""
