"""Copies for torch.save: small storages, same structure."""

from collections import OrderedDict, namedtuple

import torch

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

Pair = namedtuple("Pair", "left right")


def test_copies_own_just_their_size():
    flat = torch.arange(1000.0)
    state = OrderedDict(a=flat[10:14].view(2, 2), b=[flat[:3], ("text", flat[5])], c=Pair(flat[1:2], 7))
    copy = clone_tensors_for_torch_save(state)
    assert type(copy) is OrderedDict and list(copy) == ["a", "b", "c"] and isinstance(copy["c"], Pair)
    assert copy["b"][1][0] == "text" and copy["c"].right == 7
    for original, cloned in (
        (state["a"], copy["a"]),
        (state["b"][0], copy["b"][0]),
        (state["b"][1][1], copy["b"][1][1]),
    ):
        assert torch.equal(original, cloned)
        assert cloned.untyped_storage().nbytes() == cloned.nbytes
        assert cloned.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()


def test_detached_dtype_and_device():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    copy = clone_tensors_for_torch_save({"w": weight})["w"]
    assert not copy.requires_grad and copy.dtype == torch.bfloat16 and copy.device.type == "cpu"
    assert clone_tensors_for_torch_save(weight, device="meta").is_meta


def test_tied_tensors_do_not_share_storage():
    weight = torch.ones(3)
    copy = clone_tensors_for_torch_save({"a": weight, "b": weight})
    assert copy["a"].data_ptr() != copy["b"].data_ptr()


def test_expanded_and_strided_tensors():
    base = torch.arange(12.0).view(3, 4)
    for tensor in (base.t(), base[:, ::2], base[:1].expand(5, 4)):
        copy = clone_tensors_for_torch_save(tensor)
        assert torch.equal(copy, tensor) and copy.untyped_storage().nbytes() <= copy.nbytes
