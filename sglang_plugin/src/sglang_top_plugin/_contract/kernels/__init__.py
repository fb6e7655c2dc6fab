"""The numerics both engines must share: one operation a file, one folder a kernel set.

A kernel is a pure function of its tensors. It keeps no state, reads no environment variable, launches no collective and
records no gradient: the engines' layers own sharding, communication and backwards, and hold no numerics of their own.
:func:`kernel_set.load_kernel_set` is the one way in.
"""
