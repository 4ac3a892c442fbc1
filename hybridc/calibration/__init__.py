"""Calibration: kernels built on one machine and timed on another, which needs no compiler.

:mod:`micro` and :mod:`build` belong to the compiler; :mod:`record`, :mod:`timing`, :mod:`run` and
:mod:`machine` need the loader only.
"""
