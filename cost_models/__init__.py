"""Cost models: what a piece of a model costs on a device.

:mod:`work` counts operations and bytes, :mod:`group_work` sums them over a group, :mod:`device` and
:mod:`link` hold what is known about hardware, and :mod:`roofline`, :mod:`calibrate`, :mod:`learned`
and :mod:`measured` make seconds of it. :mod:`train` makes the trees of :mod:`learned`. :mod:`load`
puts together what a device's profile brings.
"""
