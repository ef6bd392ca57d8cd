"""The reference over an engine's own weights: what a pack holds, handed to reference/ value for value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fermi_engine.formats import Matrix
from fermi_engine.pack import Pack
from fermi_engine.vision.config import QWEN
from fermi_engine.vision.plans import Grid
from reference.decoder import Decoder
from reference.quant import QuantMatrix, unpack_q4_0, unpack_q8_0
from reference.vision_minicpm import MiniCpmVision
from reference.vision_qwen import QwenVision, text_positions


def decoder(pack: Pack, activations: str = "q8_0", dtype: torch.dtype = torch.float64, layer: int | None = None) -> Decoder:
    """reference.decoder.Decoder over the pack's stored values.

    activations 'q8_0': quantised matrices stay quantised (integer dots); 'f32': they are dequantised first, exactly.
    layer: of a large pack read this one only; the decoder has neither embedding nor head then.
    """
    return Decoder(pack.config, params(pack, activations, layer)).to(dtype)


class Tower:
    """A pack's tower, its weights dequantised, and where it has a prompt's tokens stand."""

    def __init__(self, pack: Pack, dtype: torch.dtype = torch.float64) -> None:
        self.config, self.dtype = pack.vision, dtype
        self.is_qwen = pack.vision.family == QWEN
        prefixes = ("visual.",) if self.is_qwen else ("vision_tower.", "merger.")
        named = {name.removeprefix("visual."): value for name, value in params(pack, "f32").items() if name.startswith(prefixes)}
        self.model = (QwenVision if self.is_qwen else MiniCpmVision)(pack.vision, named).to(dtype)

    def rows(self, patches: np.ndarray, grids: Sequence[Grid]) -> torch.Tensor:
        """Embeddings [tokens, out] of one image (image_patches.PreparedImage)."""
        extra = () if self.is_qwen else (self.config.images.downsample_mode,)
        return self.model.forward(torch.from_numpy(patches).to(self.dtype), list(grids), *extra)

    def positions(self, ids: Sequence[int], grids: Sequence[Grid]) -> tuple[torch.Tensor, int]:
        """int64 [3, T] of ids, and that of the token that follows. grids: of the images' only views (Qwen)."""
        if self.is_qwen:
            return text_positions(ids, self.config.image_token_id, grids)
        return torch.arange(len(ids)).expand(3, -1), len(ids)


def params(pack: Pack, activations: str, layer: int | None = None) -> dict[str, object]:
    """Canonical name -> float32 tensor or QuantMatrix, for every weight in the pack, or in one layer and the final norm."""
    c = pack.config
    found: dict[str, object] = {}
    for name in weight_names(pack):
        if layer is not None and name != "norm.weight" and not name.startswith(f"layers.{layer}."):
            continue
        if name.endswith("conv1d.weight"):
            found[name] = torch.from_numpy(np.ascontiguousarray(pack.vector(name).T)).unsqueeze(1)
        elif name in pack.matrix_names:
            found[name] = weight(pack.matrix(name), activations)
        else:
            found[name] = torch.from_numpy(np.array(pack.vector(name)))
    chosen = range(c.num_hidden_layers) if layer is None else (layer,)
    for i in chosen if c.num_experts else ():
        pairs = [pack.expert(i, e) for e in range(c.num_experts)]
        for part, which in (("gate_up_proj", 0), ("down_proj", 1)):
            experts = [weight(pair[which], activations) for pair in pairs]
            plain = isinstance(experts[0], torch.Tensor)
            found[f"layers.{i}.mlp.experts.{part}"] = torch.stack(experts) if plain else experts
    return found


def weight_names(pack: Pack) -> list[str]:
    """Names of vectors and matrices, without experts and bookkeeping."""
    return [name for name in pack.names if not name.startswith("_") and not name.endswith("experts.blob")]


def weight(matrix: Matrix, activations: str) -> torch.Tensor | QuantMatrix:
    """A stored matrix as the reference takes it."""
    if activations == "q8_0" and matrix.format in ("q4_0", "q8_0"):
        plain = torch.from_numpy(np.array(matrix.plain()))
        unpack = unpack_q4_0 if matrix.format == "q4_0" else unpack_q8_0
        return QuantMatrix(*unpack(plain), matrix.format)
    return torch.from_numpy(np.array(matrix.dequantize()))
