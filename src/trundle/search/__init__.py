"""From a budget to a model."""
