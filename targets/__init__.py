"""Targets: one folder per kind of device, each with the same inner shape.

    targets/<kind>/__init__.py    TARGET, the object that protocol.Target describes
    targets/<kind>/build.py       Relax module -> files of the bundle
    targets/<kind>/schedules/     how its kernels are written

Targets are found through the entry-point group ``hybridc.targets``, so one that lives in another
distribution is used like those here.
"""
