"""Vision: the image half of an engine. Files to pixels to embeddings, and their places among the tokens of a prompt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from fermi_engine.errors import RequestError, offering
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.decoder import ImageTokens
from fermi_engine.model.gpu_inputs import Spliced
from fermi_engine.model.vision_minicpm import MiniCpmVision
from fermi_engine.model.vision_qwen import QwenVision
from fermi_engine.snapshots.prefix import ImageSpan
from fermi_engine.tokenizer import Tokenizer
from fermi_engine.vision.config import QWEN, VisionConfig
from fermi_engine.vision.images import Source, load_pixels
from fermi_engine.vision.patches import PreparedImage, prepare
from fermi_engine.vision.prompt import IMAGE_PAD, expand, image_slots, mrope_positions, placeholder, text_positions

if TYPE_CHECKING:
    from fermi_engine.pack import Pack


OFFER = "--vision cpu", "encodes images on the CPU"


@dataclass
class Encoded:
    """What a tower has done since it was last asked."""

    images: int = 0
    views: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)  # seconds by stage, of a GPU's

    def add(self, views: int, tokens: int, seconds: float, stages: Mapping[str, float] | None = None) -> None:
        """One image more."""
        self.images, self.views = self.images + 1, self.views + views
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        for name, taken in (stages or {}).items():
            self.stages[name] = self.stages.get(name, 0.0) + taken

    def line(self) -> str:
        """For a report; begins anew."""
        text = f"images encoded: {self.images} in {self.views} views to {self.tokens} tokens, {self.seconds:.2f} s"
        if self.stages:
            text += ", on the GPU: " + ", ".join(f"{name} {1e3 * taken:.1f} ms" for name, taken in self.stages.items())
        self.images, self.views, self.tokens, self.seconds, self.stages = 0, 0, 0, 0.0, {}
        return text


class Tower(Protocol):
    """What makes embeddings of patches, wherever it runs."""

    def forward(self, patches: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
        """patches [N, patch_width] of views end to end -> embeddings float32 [tokens, hidden]."""


class Vision:
    """A pack's tower bound to kernels."""

    def __init__(self, pack: Pack, kernels: CpuKernels, activations: str = "q8_0",
                 on_gpu: Callable[[], Tower] | None = None) -> None:
        """on_gpu: makes the tower that encodes in place of the CPU's, when it is first needed. RequestError where the pack holds
        none."""
        if pack.vision is None:
            raise RequestError(f"{pack.path} holds no vision tower: the model takes text only; convert a checkpoint with one, "
                               "or leave the images out")
        self.config: VisionConfig = pack.vision
        self.encoded = Encoded()
        self._pack, self._kernels, self._activations, self._on_gpu = pack, kernels, activations, on_gpu

    @cached_property
    def tower(self) -> Tower:
        """The model's own. Raises DeviceError where a GPU cannot have it."""
        if self._on_gpu is not None:
            return self._on_gpu()
        kind = QwenVision if self.config.family == QWEN else MiniCpmVision
        return kind(self._pack, self.config, self._kernels, self._activations)

    def prepare(self, source: Source, name: str | None = None) -> PreparedImage:
        """A file, its bytes, or pixels uint8 [height, width, 3]; `name` is for messages. Raises ImageError."""
        if name is None:
            name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "image"
        return prepare(load_pixels(source, name), self.config.images, name)

    def encode(self, image: PreparedImage) -> np.ndarray:
        """Embeddings [tokens, hidden] of all its views in order. Raises DeviceError, one line, where a GPU fails."""
        start = time.perf_counter()
        with self._kernels.held():
            tower = self.tower
            with offering(*OFFER):
                rows = tower.forward(image.patches, image.grids)
        last = getattr(self.tower, "last", None)
        self.encoded.add(len(image.grids), len(rows), time.perf_counter() - start, last and last.seconds)
        return rows

    @property
    def marker(self) -> str:
        """What a prompt without a chat template writes for an image; `expand` fills it."""
        return f"<|vision_start|>{IMAGE_PAD}<|vision_end|>" if self.config.family == QWEN else IMAGE_PAD

    def expand(self, tokenizer: Tokenizer, ids: Sequence[int], images: Sequence[PreparedImage]) -> list[int]:
        """Prompt ids with one image token per image -> with the tokens that each image takes.

        Raises RequestError where places and images differ in number.
        """
        texts = [placeholder(image, self.config.images, index) for index, image in enumerate(images)]
        return expand(ids, self.config.image_token_id, [tokenizer.encode(text) for text in texts])

    def place(self, ids: np.ndarray, images: Sequence[PreparedImage], first: int = 0, start: int | None = None) -> PlacedImages:
        """Images among expanded ids [T], whose first is token `first` of a sequence and has position `start` (by default as
        many). RequestError where they do not fit."""
        start = first if start is None else start
        counts = [sum(image.tokens) for image in images]
        slots = image_slots(ids, self.config.image_token_id, sum(counts))
        if self.config.family == QWEN:
            axes, end = mrope_positions(ids, self.config.image_token_id, [image.grids[0] for image in images], start)
        else:
            axes, end = text_positions(len(ids), start), start + len(ids)
        parts = np.split(slots, np.cumsum(counts)[:-1])
        placed = tuple(Placed(image, part) for image, part in zip(images, parts, strict=True))
        return PlacedImages(self, axes, placed, first, end)


@dataclass(frozen=True, eq=False)
class Placed:
    """One image of a run: which of its tokens the embeddings replace, int64 [tokens]."""

    image: PreparedImage
    slots: np.ndarray

    @property
    def begin(self) -> int:
        """Its first token."""
        return int(self.slots[0])

    @property
    def end(self) -> int:
        """One after its last token."""
        return int(self.slots[-1]) + 1


class Seen(NamedTuple):
    """What images have left behind in a sequence: where they stood, and how far positions are ahead of counts of tokens."""

    images: tuple[ImageSpan, ...] = ()
    shift: int = 0

    def after(self, tokens: int) -> int:
        """Position of the token that follows so many."""
        return tokens + self.shift if tokens else 0


class PlacedImages:
    """The images of a run of tokens: positions of all its tokens int32 [3, T], images in order. `first` is its first token's
    number in the sequence, `end` the position of the token that follows. What gpu_inputs.Inputs wants, too.

    An image is encoded when a token of it is asked for, once.
    """

    def __init__(self, vision: Vision, axes: np.ndarray, images: tuple[Placed, ...], first: int, end: int) -> None:
        self.axes, self.images, self.first, self.end = axes, images, first, end
        self._vision = vision
        self._rows: dict[int, np.ndarray] = {}

    def seen(self, before: Seen | None = None) -> Seen:
        """What the sequence has seen after the run, where it has seen `before` until then."""
        spans = [ImageSpan(self.first + one.begin, self.first + one.end, one.image.digest) for one in self.images]
        earlier = tuple(span for span in (before.images if before else ()) if span.begin < self.first)
        return Seen((*earlier, *spans), self.end - self.first - self.axes.shape[1])

    def shift_at(self, tokens: int) -> int:
        """How far positions are ahead of counts behind the run's first `tokens`, for a run that begins a sequence."""
        return int(self.axes[:, :tokens].max(initial=-1)) + 1 - tokens

    def part(self, begin: int, end: int) -> ImageTokens:
        """Tokens begin..end of the sequence, all of the run."""
        slots, rows = [np.empty(0, np.int64)], [np.empty((0, self._vision.config.out_hidden_size), np.float32)]
        for first, run in self.embeddings(begin, end):
            slots.append(np.arange(first, first + len(run)))
            rows.append(run)
        return ImageTokens(self.positions(begin, end), np.concatenate(slots), np.concatenate(rows))

    def encode(self, begin: int) -> None:
        """Have the embeddings of all images that tokens from `begin` of the sequence on belong to."""
        for index, placed in enumerate(self.images):
            if placed.end > begin - self.first:
                self._encoded(index)

    def positions(self, begin: int, end: int) -> np.ndarray:
        """Of tokens begin..end of the sequence, all of the run: int32 [3, end - begin]."""
        return np.ascontiguousarray(self.axes[:, begin - self.first : end - self.first])

    def embeddings(self, begin: int, end: int) -> list[Spliced]:
        """Those of tokens begin..end of the sequence in runs without gaps, each with the number of its first token counted from
        `begin`."""
        found, begin, end = [], begin - self.first, end - self.first
        for index, placed in enumerate(self.images):
            first, last = np.searchsorted(placed.slots, (begin, end))
            if first < last:
                gaps = np.flatnonzero(np.diff(placed.slots[first:last]) != 1) + 1
                cuts = [int(first), *(first + gaps).tolist(), int(last)]
                rows = self._encoded(index)
                found += [(int(placed.slots[a]) - begin, rows[a:b]) for a, b in pairwise(cuts)]
        return found

    def _encoded(self, index: int) -> np.ndarray:
        if index not in self._rows:
            self._rows[index] = self._vision.encode(self.images[index].image)
        return self._rows[index]
