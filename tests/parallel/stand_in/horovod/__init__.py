"""A stand-in for Horovod, which does not build with this torch as it is."""
