"""What stays alive of a call, garbage collected."""

import gc

import torch


def bytes_left_by(function):
    """Bytes in the tensors that a function makes and Python still reaches once its result is dropped.

    A cycle of autograd's nodes that no collection frees goes through such a tensor. What autograd alone holds is not
    counted.
    """
    gc.freeze()  # leaves what the function makes to the collection below
    try:
        function()
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
    finally:
        gc.unfreeze()
