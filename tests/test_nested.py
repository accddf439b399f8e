"""Walks over nested values."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from deepspeed.nested import map_tensors, tensors_of

Pair = namedtuple("Pair", ("first", "second"))


@dataclass
class Record:
    value: Any
    name: str = "x"


def test_what_a_change_holds_is_freed_with_its_last_reference():
    gc.collect()
    gc.disable()
    try:
        held = torch.ones(3)
        reference = weakref.ref(held)
        map_tensors([torch.ones(3), {"a": (torch.ones(3),)}], partial(torch.add, held))
        del held
        assert reference() is None
    finally:
        gc.enable()


def test_containers_are_rebuilt_and_the_rest_stays():
    one, other = torch.ones(2), object()
    given = {"list": [one, other, 3], "tuple": (one, Pair(one, "text")), "none": None}
    found = map_tensors(given, lambda tensor: tensor + 1)
    assert found["list"][1] is other and found["list"][2] == 3 and found["none"] is None
    assert type(found["tuple"][1]) is Pair and found["tuple"][1].second == "text"
    for changed in (found["list"][0], found["tuple"][0], found["tuple"][1].first):
        assert changed.tolist() == [2, 2]
    assert one.tolist() == [1, 1] and given["list"][0] is one


def test_mappings_keep_their_class_and_attributes_where_they_can_be_copied():
    for given in (OrderedDict(x=torch.ones(1)), defaultdict(list, x=torch.ones(1)), UserDict(x=torch.ones(1))):
        found = map_tensors(given, lambda tensor: tensor * 3)
        assert type(found) is type(given) and found["x"].item() == 3 and given["x"].item() == 1
    assert map_tensors(defaultdict(list, x=torch.ones(1)), torch.neg)["missing"] == []
    assert map_tensors(MappingProxyType({"x": torch.ones(1)}), torch.neg) == {"x": -torch.ones(1)}


def test_dataclasses_are_changed_on_request():
    given = Record([torch.ones(1)])
    assert map_tensors([given], torch.neg)[0] is given
    found = map_tensors([given], torch.neg, in_dataclasses=True)[0]
    assert type(found) is Record and found.name == "x" and found.value[0].item() == -1 and given.value[0].item() == 1


def test_a_predicate_chooses_what_is_changed():
    assert map_tensors([1, "a", (2, {"b": 3})], lambda number: -number, lambda item: isinstance(item, int)) == [
        -1,
        "a",
        (-2, {"b": -3}),
    ]


def test_tensors_come_in_order_and_as_often_as_they_occur():
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(tensors_of(({"a": first, "b": [second, 1]}, UserDict(c=third), first, "text", None)))
    assert [tensor.numel() for tensor in found] == [1, 2, 3, 1] and found[0] is found[3]
