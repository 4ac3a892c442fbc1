"""Hybrid compiles: part of a model here, part on a server, with several plans in one bundle."""
