"""Vision: the image half of an engine. Files to pixels to embeddings, and their places among the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fermi_engine.errors import RequestError
from fermi_engine.image_patches import PreparedImage, prepare
from fermi_engine.image_prompt import expand, image_slots, mrope_positions, placeholder, text_positions
from fermi_engine.images import Source, load_pixels
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.decoder import ImageTokens
from fermi_engine.model.vision_minicpm import MiniCpmVision
from fermi_engine.model.vision_qwen import QwenVision
from fermi_engine.tokenizer import Tokenizer
from fermi_engine.vision_config import QWEN, VisionConfig

if TYPE_CHECKING:
    from fermi_engine.pack import Pack


class Vision:
    """A pack's tower bound to kernels."""

    def __init__(self, pack: Pack, kernels: CpuKernels, activations: str = "q8_0") -> None:
        """RequestError where the pack holds no tower."""
        if pack.vision is None:
            raise RequestError(f"{pack.path} holds no vision tower: the model takes text only; convert a checkpoint with one, "
                               "or leave the images out")
        self.config: VisionConfig = pack.vision
        self._pack, self._kernels, self._activations = pack, kernels, activations

    @cached_property
    def tower(self) -> QwenVision | MiniCpmVision:
        """The model's own."""
        kind = QwenVision if self.config.family == QWEN else MiniCpmVision
        return kind(self._pack, self.config, self._kernels, self._activations)

    def prepare(self, source: Source, name: str | None = None) -> PreparedImage:
        """A file, its bytes, or pixels uint8 [height, width, 3]; `name` is for messages. Raises ImageError."""
        pixels = load_pixels(source, name)
        return prepare(pixels, self.config.images, name or (str(source) if isinstance(source, str) else "image"))

    def encode(self, image: PreparedImage) -> np.ndarray:
        """Embeddings [tokens, hidden] of all its views in order."""
        with self._kernels.held():
            return self.tower.forward(image.patches, image.grids)

    def expand(self, tokenizer: Tokenizer, ids: Sequence[int], images: Sequence[PreparedImage]) -> list[int]:
        """Prompt ids with one image token per image -> with the tokens that each image takes.

        Raises RequestError where places and images differ in number.
        """
        texts = [placeholder(image, self.config.images, index) for index, image in enumerate(images)]
        return expand(ids, self.config.image_token_id, [tokenizer.encode(text) for text in texts])

    def place(self, ids: np.ndarray, images: Sequence[PreparedImage], start: int = 0) -> PlacedImages:
        """Images among expanded ids [T] whose first token has position `start`. RequestError where they do not fit."""
        counts = [sum(image.tokens) for image in images]
        slots = image_slots(ids, self.config.image_token_id, sum(counts))
        if self.config.family == QWEN:
            axes, end = mrope_positions(ids, self.config.image_token_id, [image.grids[0] for image in images], start)
        else:
            axes, end = text_positions(len(ids), start), start + len(ids)
        spans, first = [], 0
        for image, count in zip(images, counts, strict=True):
            spans.append(Placed(image, slots[first:first + count]))
            first += count
        return PlacedImages(self, axes, tuple(spans), end)


@dataclass(frozen=True, eq=False)
class Placed:
    """One image of a prompt: which tokens its embeddings replace, int64 [tokens]."""

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


class PlacedImages:
    """The images of a run of tokens: positions of all tokens int32 [3, T], images in order, position of what follows.

    An image is encoded when a token of it is asked for, once.
    """

    def __init__(self, vision: Vision, axes: np.ndarray, images: tuple[Placed, ...], end: int) -> None:
        self.axes, self.images, self.end = axes, images, end
        self._vision = vision
        self._rows: dict[int, np.ndarray] = {}

    def part(self, begin: int, end: int) -> ImageTokens:
        """Tokens begin..end of the run."""
        slots, rows = [np.empty(0, np.int64)], [np.empty((0, self._vision.config.out_hidden_size), np.float32)]
        for index, placed in enumerate(self.images):
            first, last = np.searchsorted(placed.slots, (begin, end))
            if first < last:
                slots.append(placed.slots[first:last] - begin)
                rows.append(self._encoded(index)[first:last])
        axes = np.ascontiguousarray(self.axes[:, begin:end])
        return ImageTokens(axes, np.concatenate(slots), np.concatenate(rows))

    def _encoded(self, index: int) -> np.ndarray:
        if index not in self._rows:
            self._rows[index] = self._vision.encode(self.images[index].image)
        return self._rows[index]
