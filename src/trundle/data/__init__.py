"""Texts and labelled examples: reading files, splitting, sampling and augmenting."""
