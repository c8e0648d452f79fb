"""Functions with the signatures that Horovod 0.28 documents, on top of torch.distributed.

It shows what outpace hands over and when, and that what comes back is put where it belongs: nothing
about Horovod. As there, buffers are matched by name, and a name is used once at a time.
"""

import os

import torch.distributed as dist

Sum = 1
_pending = {}


def init():
    pass


def rank():
    return int(os.environ["RANK"])


def size():
    return int(os.environ.get("STAND_IN_SIZE", os.environ["WORLD_SIZE"]))


def allreduce_async_(
    tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0
):
    assert op == Sum and name not in _pending and tensor.is_contiguous()
    _pending[name] = (tensor.clone(), tensor)
    return name


def synchronize(handle):
    given, tensor = _pending.pop(handle)
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, handle)
    assert set(said) == {handle}
    assert (tensor == given).all()  # nobody has written to it since
    dist.all_reduce(tensor)
    return tensor
