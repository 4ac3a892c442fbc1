"""Bundles: what a compile writes and a loader reads. Nothing here runs code on reading."""
