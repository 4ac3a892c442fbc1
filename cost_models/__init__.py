"""Cost models: what a piece of a model costs on a device.

:mod:`work` counts operations and bytes, :mod:`group_work` sums them over a group, :mod:`device` and
:mod:`link` hold what is known about hardware, and :mod:`roofline`, :mod:`measured` and
:mod:`calibrate` make seconds of it. :mod:`load` puts together what a device's profile brings.
"""
