"""Builds stores of teacher vectors, in one process or on a Ray cluster."""
