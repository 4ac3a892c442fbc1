"""Cost models: what a piece of a model costs on a device.

:mod:`work` counts operations and bytes, which every model of time starts from.
"""
