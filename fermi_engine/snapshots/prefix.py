"""Prefix: what a state depends on. Token ids, images among them, and the numeric path that evaluated them.

Two prefixes have equal digests at a position exactly if a state after that many tokens of the one can stand for a state of the
other: same tokens, same images, same model, same rounding. Digests are blake2b (RFC 7693) of 256 bits, keyed by the path, over
the tokens as little-endian int32. An image puts a marker before its first token, -1 (no token is), its length and its digest,
so that no two prefixes give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

import fermi_engine

DIGEST_BYTES = 32
_IMAGE = -1


@dataclass(frozen=True)
class NumericPath:
    """What the bits of a state depend on beside tokens and images.

    pack_hash: seal of the pack. activations, kv_format: of EngineConfig. prefill: 'cpu', or with whose products on which device:
    'gpu own cuda'; 'resident own cuda' where that device decodes, too; who encodes images where it is somebody else. version: of
    the engine.
    """

    pack_hash: str
    activations: str
    kv_format: str
    prefill: str = "cpu"
    version: str = field(default_factory=lambda: fermi_engine.__version__)

    @classmethod
    def of(cls, pack_hash: str, options: Any) -> NumericPath:
        """From a pack's seal and an EngineConfig."""
        way = "resident" if options.decode == "gpu" else options.prefill
        prefill = "cpu" if way == "cpu" else f"{way} {options.gemm} {options.device}"
        if options.is_vision_on_gpu != (way in ("resident", "gpu")):
            prefill += f", images on {'gpu' if options.is_vision_on_gpu else 'cpu'}"
        return cls(pack_hash, options.activations, options.kv_format, prefill)

    def fields(self) -> dict[str, str]:
        """Its parts by name, for files: NumericPath(**path.fields()) == path."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def digest(self) -> bytes:
        """32 bytes; each part is preceded by its length."""
        hash = blake2b(digest_size=DIGEST_BYTES)
        for value in self.fields().values():
            text = value.encode()
            hash.update(len(text).to_bytes(4, "little") + text)
        return hash.digest()


@dataclass(frozen=True)
class ImageSpan:
    """Tokens begin..end stand for an image. digest: of 32 bytes, over its pixels, how they were prepared, and the grid."""

    begin: int
    end: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end or len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"image at tokens {self.begin}..{self.end} with a digest of {len(self.digest)} bytes")


class Prefix:
    """Tokens int32 [N], `images` among them in order, and the path. Never changed; equal prefixes are interchangeable."""

    def __init__(self, ids: Sequence[int] | np.ndarray, path: NumericPath, images: Sequence[ImageSpan] = ()) -> None:
        """ids: 0 or more, each at least 0. ValueError for images that overlap, are out of order or do not begin among the ids."""
        self.ids = np.array(ids, np.int32)  # a copy: what comes from outside may change
        self.ids.flags.writeable = False
        self.path, self.images = path, tuple(images)
        ends = [0, *(image.end for image in self.images)]
        if any(image.begin < end for image, end in zip(self.images, ends, strict=False)) or self.ids.min(initial=0) < 0 \
                or (self.images and self.images[-1].begin >= len(self.ids)):
            raise ValueError("images must lie among the tokens one after another, and ids are at least 0")
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and len(self) == len(other) and self.agrees(other, len(self))

    def __hash__(self) -> int:
        return hash(self.digest())

    def agrees(self, other: Prefix, position: int) -> bool:
        """Whether the first `position` tokens (no more than either has), their images and the paths are the same."""
        return (self.path == other.path and _among(self.images, position) == _among(other.images, position)
                and np.array_equal(self.ids[:position], other.ids[:position]))

    def common(self, other: Prefix) -> int:
        """Length of the longest beginning that both have; 0 where the paths differ."""
        if self.path != other.path:
            return 0
        length = min(len(self), len(other))
        differ = np.flatnonzero(self.ids[:length] != other.ids[:length])
        length = int(differ[0]) if differ.size else length
        for mine, its in zip(self._spans(other), other._spans(self), strict=True):
            if mine != its:
                return min([length, *(image.begin for image in (mine, its) if image)])
        return length

    def _spans(self, other: Prefix) -> list[ImageSpan | None]:
        """The images, as many as the longer of both lists."""
        return [*self.images, *[None] * (len(other.images) - len(self.images))]

    def head(self, position: int) -> Prefix:
        """The first `position` tokens; shares the memory of `ids`."""
        if not 0 <= position <= len(self):
            raise ValueError(f"the first {position} of {len(self)} tokens")
        head = object.__new__(Prefix)
        head.ids, head.path, head.images = self.ids[:position], self.path, _among(self.images, position)
        head._digests = {at: digest for at, digest in self._digests.items() if at <= position}
        return head

    def digest(self, position: int | None = None) -> bytes:
        """Of the first `position` tokens (default: all), 32 bytes."""
        position = len(self) if position is None else position
        return self.digests([position])[position]

    def digests(self, positions: Iterable[int]) -> dict[int, bytes]:
        """By position, in one pass over the tokens. ValueError for positions that are not there."""
        wanted = sorted(set(positions))
        if wanted and not 0 <= wanted[0] <= wanted[-1] <= len(self):
            raise ValueError(f"digest at position {wanted[0]}..{wanted[-1]} of {len(self)} tokens")
        if any(position not in self._digests for position in wanted):
            self._extend(wanted)
        return {position: self._digests[position] for position in wanted}

    def _extend(self, wanted: list[int]) -> None:
        hash = blake2b(digest_size=DIGEST_BYTES, key=self.path.digest())
        edges = [(image.begin, image) for image in self.images]
        done = 0
        for position in wanted:
            while edges and edges[0][0] < position:
                begin, image = edges.pop(0)
                hash.update(self._bytes(done, begin) + _marker(image))
                done = begin
            hash.update(self._bytes(done, position))
            self._digests[position] = hash.copy().digest()
            done = position

    def _bytes(self, begin: int, end: int) -> bytes:
        return self.ids[begin:end].astype("<i4", copy=False).tobytes()


def _among(images: tuple[ImageSpan, ...], position: int) -> tuple[ImageSpan, ...]:
    """Those that the first `position` tokens have to do with, also one that they cut: its content is in the state."""
    return tuple(image for image in images if image.begin < position)


def _marker(image: ImageSpan) -> bytes:
    return np.array([_IMAGE, image.end - image.begin], "<i4").tobytes() + image.digest
