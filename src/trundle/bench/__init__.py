"""Measure the speed, memory and size of models."""
