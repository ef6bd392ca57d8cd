"""Sealed files: what goes in comes out, the safetensors library reads them, and no wrong byte gets through."""

from __future__ import annotations

import os

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fermi_engine.errors import SnapshotError
from fermi_engine.snapshots import sealed_file
from fermi_engine.snapshots.sealed_file import SealedFile, Tensor

META = {"format": "test", "text": "é\n\"quoted\""}


def example(seed: int = 0) -> list[Tensor]:
    """One tensor of each dtype, an empty one, one in parts, none of them a multiple of 64 bytes."""
    rng = np.random.default_rng(seed)
    return [sealed_file.tensor("ids", rng.integers(0, 99, 5).astype(np.int32)),
            sealed_file.tensor("none", np.zeros((2, 0, 3), np.uint8)),
            sealed_file.tensor("values", rng.standard_normal((3, 7)).astype(np.float32)),
            Tensor("rows", "U8", (2, 3, 5), [rng.integers(0, 256, shape).astype(np.uint8) for shape in ((2, 5), (0, 5), (4, 5))])]


def empty(tensors: list[Tensor]) -> list[Tensor]:
    return [t._replace(parts=[np.full_like(part, 77) for part in t.parts]) for t in tensors]


def written(path, tensors, meta=META):
    planned = sealed_file.plan(tensors, meta)
    with open(path, "wb") as file:
        sealed_file.write(file.fileno(), planned, tensors)
    assert path.stat().st_size == planned.total_bytes
    return path


def read(path, tensors):
    targets = empty(tensors)
    with SealedFile.open(path) as file:
        file.read(targets)
        return targets, file.metadata


def raw(t: Tensor) -> bytes:
    return b"".join(part.tobytes() for part in t.parts)


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "x.safetensors", example())


def test_what_goes_in_comes_out(path):
    found, metadata = read(path, example())
    assert metadata == META
    assert [raw(t) for t in found] == [raw(t) for t in example()]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_pieces_of_any_size_give_the_same_file(path, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sealed_file, "CHUNK_BYTES", chunk)
    assert written(tmp_path / "y", example()).read_bytes() == path.read_bytes()
    assert [raw(t) for t in read(path, example())[0]] == [raw(t) for t in example()]


def test_reads_and_writes_that_come_short_go_on(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    path = written(tmp_path / "y", example())
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:3]], offset))
    assert [raw(t) for t in read(path, example())[0]] == [raw(t) for t in example()]


def test_the_safetensors_library_reads_it(path):
    found = safetensors.numpy.load_file(path)
    for t in example():
        assert found[t.name].shape == t.shape
        assert found[t.name].tobytes() == raw(t)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == META


def test_a_wrong_byte_anywhere_is_noticed(path):
    """Every byte of the file, one bit each: header, tensors, pads and seal."""
    good = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for place, byte in enumerate(good):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
            with pytest.raises(SnapshotError, match=r"x\.safetensors"):
                read(path, example())
            os.pwrite(file.fileno(), bytes([byte]), place)
    read(path, example())


def test_a_file_cut_short_or_too_long_is_noticed(path):
    good = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, 4095, 4096, 4097, len(good) - 33, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(SnapshotError, match=r"x\.safetensors"):
            read(path, example())
    path.write_bytes(good + b"\0")
    with pytest.raises(SnapshotError, match="longer"):
        read(path, example())


def test_a_file_that_shrinks_while_it_is_read(path):
    with SealedFile.open(path) as file:
        os.truncate(path, file._start + 10)
        with pytest.raises(SnapshotError, match="became shorter"):
            file.read(empty(example()))


def test_an_open_file_outlives_its_name(path, tmp_path):
    with SealedFile.open(path) as file:
        other = written(tmp_path / "other", example(1))
        os.replace(other, path)
        targets = empty(example())
        file.read(targets)
        path.unlink()
    assert [raw(t) for t in targets] == [raw(t) for t in example()]


@settings(max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused_in_one_line(tmp_path_factory, noise, with_length):
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    path.write_bytes(len(noise).to_bytes(8, "little") + noise if with_length else noise)
    with pytest.raises(SnapshotError) as caught:
        read(path, example())
    assert "\n" not in str(caught.value)


def test_other_tensors_than_expected_are_refused(path):
    wanted = example()
    for tensors, found in (
        (wanted[:-1], r"tensor rows is U8 \[2, 3, 5\], expected absent"),
        ([*wanted, sealed_file.tensor("more", np.zeros(1, np.uint8))], r"tensor more is absent, expected U8 \[1\]"),
        ([wanted[0]._replace(shape=(1, 5)), *wanted[1:]], r"tensor ids is I32 \[5\], expected I32 \[1, 5\]"),
        ([wanted[0]._replace(dtype="F32"), *wanted[1:]], r"tensor ids is I32 \[5\], expected F32 \[5\]"),
    ):
        with pytest.raises(SnapshotError, match=found):
            read(path, tensors)


def test_a_safetensors_file_without_a_seal_is_foreign(tmp_path):
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, path)
    with pytest.raises(SnapshotError, match="no seal"):
        SealedFile.open(path)


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_only_regular_files_are_opened(path, tmp_path, kind):
    """A link is not followed, and nothing waits for a writer of a pipe."""
    odd = tmp_path / "odd"
    {"link": lambda: odd.symlink_to(path), "directory": odd.mkdir, "fifo": lambda: os.mkfifo(odd)}[kind]()
    with pytest.raises((SnapshotError, OSError), match=r"odd"):
        SealedFile.open(odd)


def test_no_file_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        SealedFile.open(tmp_path / "none")
