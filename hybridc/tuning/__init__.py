"""Choices of the schedules by measurement, and the file that keeps them."""
