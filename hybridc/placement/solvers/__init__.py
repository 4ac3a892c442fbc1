"""Solvers of the placement problem, one file each behind one protocol, and the choice among them.

A solver says whether it can take a problem and gives a placement with a bound: no placement is
better than the bound. Where both are equal the placement is proven.
"""
