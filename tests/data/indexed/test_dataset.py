"""Indexed datasets: the bytes of the published format, and what comes back of what was written."""

import pickle
import struct

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.data.indexed import write_dataset
from deepspeed.data.indexed.format import smallest_type
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
)

ITEMS = [[5, 6, 7], [], [300], [8, 9]]


def build(folder, items, dtype=numpy.int32, ends=(), name="set", **options):
    builder = MMapIndexedDatasetBuilder(f"{folder}/{name}.bin", dtype, **options)
    for number, item in enumerate(items):
        builder.add_item(torch.tensor(item, dtype=torch.int64))
        if number in ends:
            builder.end_document()
    builder.finalize(f"{folder}/{name}.idx")
    return f"{folder}/{name}"


def test_the_bytes_of_the_format(tmp_path):
    name = build(tmp_path, ITEMS, ends=(1, 3))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 4, 3)
    index += struct.pack("<4i", 3, 0, 1, 2) + struct.pack("<4q", 0, 12, 12, 16) + struct.pack("<3q", 0, 2, 4)
    assert (tmp_path / "set.idx").read_bytes() == index
    assert (tmp_path / "set.bin").read_bytes() == struct.pack("<6i", 5, 6, 7, 300, 8, 9)
    assert MMapIndexedDataset.exists(name) and not MMapIndexedDataset.exists(name + "2")


def test_reading(tmp_path):
    data = MMapIndexedDataset(build(tmp_path, ITEMS, ends=(1, 3)), skip_warmup=True)
    assert len(data) == 4 and [item.tolist() for item in data[:]] == ITEMS == [data[i].tolist() for i in range(4)]
    assert data.sizes.tolist() == [3, 0, 1, 2] and data.size(3) == 2 and data.dtype == numpy.int32
    assert [part.tolist() for part in data[1:3]] == ITEMS[1:3] and data[2:2] == [] and data[-1].tolist() == [8, 9]
    assert data.get(0, offset=1).tolist() == [6, 7] and data.get(0, 1, 1).tolist() == [6]
    assert data.doc_idx.tolist() == [0, 2, 4] == data.get_doc_idx().tolist() and data.num_documents == 2
    assert [item.tolist() for item in data.document(1)] == ITEMS[2:]
    for wrong in (lambda: data[4], lambda: data[-5], lambda: data.get(0, 2, 2), lambda: data.document(2)):
        with pytest.raises(IndexError, match="below 4, the number of items|item 0 of|document 2 of"):
            wrong()
    with pytest.raises(ValueError, match="without step"):
        data[::2]
    again = pickle.loads(pickle.dumps(data))
    assert again[0].tolist() == ITEMS[0]
    with pytest.raises(ValueError, match="read-only"):
        data[0][0] = 1


@given(
    st.lists(st.lists(st.integers(0, 200), max_size=5), max_size=6),
    st.sampled_from(["uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]),
)
def test_what_is_written_comes_back(tmp_path_factory, items, dtype):
    folder = tmp_path_factory.mktemp("indexed")
    data = MMapIndexedDataset(build(folder, items, dtype))
    assert [item.tolist() for item in data[:]] == items and data.num_documents == len(items)
    if any(items):
        assert data.dtype == numpy.dtype(dtype)
    sizes = numpy.array([len(item) for item in items], dtype=numpy.int64)
    flat = numpy.array([value for item in items for value in item], dtype=dtype)
    write_dataset(folder / "whole", flat, sizes)
    for ending in ("bin", "idx"):
        assert (folder / f"whole.{ending}").read_bytes() == (folder / f"set.{ending}").read_bytes()


def test_merging_keeps_documents(tmp_path):
    build(tmp_path, ITEMS, ends=(1, 3), name="other")
    builder = MMapIndexedDatasetBuilder(tmp_path / "set.bin", numpy.int32)
    builder.add_items([numpy.array([1]), torch.tensor([2, 3])])
    builder.merge_file_(tmp_path / "other")
    builder.add_item([4])
    builder.end_document()
    with pytest.raises(ValueError, match="expected int32, .* found int64 in .*other64"):
        build(tmp_path, ITEMS, numpy.int64, name="other64")
        builder.merge_file_(tmp_path / "other64")
    builder.finalize(tmp_path / "set.idx")
    data = MMapIndexedDataset(tmp_path / "set")
    assert [item.tolist() for item in data[:]] == [[1], [2, 3], *ITEMS, [4]]
    assert data.doc_idx.tolist() == [0, 2, 4, 6, 7]


def test_types():
    assert smallest_type(0, 255) is numpy.uint8 and smallest_type(0, 256) is numpy.uint16
    assert smallest_type(-1, 127) is numpy.int8 and smallest_type(-1, 2**31) is numpy.int64
    assert smallest_type(0, 2**63) is numpy.uint64
    with pytest.raises(ValueError, match="expected a range of 64 bits"):
        smallest_type(-1, 2**63)


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(ValueError, match="expected one of int16.*found float32"):
        MMapIndexedDatasetBuilder(tmp_path / "x.bin", numpy.float32)
    builder = MMapIndexedDatasetBuilder(tmp_path / "x.bin", numpy.uint8)
    with pytest.raises(ValueError, match="values that uint8 can hold, found 0 to 256"):
        builder.add_item([0, 256])
    with pytest.raises(FileNotFoundError, match="does not exist; give the name of an indexed dataset"):
        MMapIndexedDataset(tmp_path / "missing")
    name = build(tmp_path, ITEMS)
    (tmp_path / "set.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="lists 6 values of the dtype with code 4, but .*set.bin has 3 bytes"):
        MMapIndexedDataset(name)
    index = (tmp_path / "set.idx").read_bytes()
    for content, text in (
        (index[:-1], "copy the file again"),
        (b"TNTIDX" + index, "which begins with"),
        (b"", "index of a dataset"),
    ):
        (tmp_path / "set.idx").write_bytes(content)
        with pytest.raises(ValueError, match=text):
            MMapIndexedDataset(name)


@pytest.mark.parametrize(("code", "kind"), [(6, "float64"), (8, "uint16"), (7, "float64")])
def test_megatrons_codes_are_recognized_by_the_size(tmp_path, code, kind):
    """Codes 6 to 8 stand for other types there; 16-bit tokens are what its files mostly hold."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2) + struct.pack("<iqqq", 3, 0, 0, 1)
    (tmp_path / "m.idx").write_bytes(index)
    (tmp_path / "m.bin").write_bytes(numpy.array([1, 2, 300], dtype=kind).tobytes())
    data = MMapIndexedDataset(tmp_path / "m")
    assert data.dtype == numpy.dtype(kind) and data[0].tolist() == [1, 2, 300]
    if kind == "uint16":
        build(tmp_path, [[1, 2, 300]], numpy.uint16, name="ours", for_megatron=True)
        assert (tmp_path / "ours.idx").read_bytes() == index
