"""Placement: which device runs which part of the model."""
