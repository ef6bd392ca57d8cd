"""Muon for the matrices inside the network, AdamW for embedding, head, routers, gates and vectors.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") replaces the momentum of a matrix by its nearest
orthogonal matrix, found by a quintic Newton-Schulz iteration; scaled by 0.2 sqrt(max(rows, columns)) its steps have the
size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training"), so both share one learning rate and weight decay.
Weights whose singular values stay alike have no outlier rows, which helps 4-bit blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fermi_engine.vision.config import is_vision
from tools.tiny_quantise import Master

ORTHOGONAL = ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight", "q_proj.weight", "k_proj.weight",
              "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight",
              "experts.gate_up_proj", "experts.down_proj",
              "attn.qkv.weight", "attn.proj.weight", "linear_fc1.weight", "linear_fc2.weight")
BETAS, MOMENTUM, EPS, WEIGHT_DECAY = (0.9, 0.98), 0.95, 1e-10, 0.1
EMBEDDING_SCALE = 2.0
TOWER_SCALE = 2.0  # the vision tower starts from nothing where the rest goes on


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """[..., r, c] -> about the nearest matrices with singular values 1 (0.7..1.2), by Newton-Schulz."""
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-12)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


class Optimiser:
    """State and step over a Master; `first` and `second` are vectors like its `flat` (`second` unused under Muon)."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self.first, self.second = torch.zeros_like(master.flat), torch.zeros_like(master.flat)
        self.steps = 0
        names = list(master.shapes)
        self._inner = [name for name in names if name.endswith(ORTHOGONAL)]
        per_tensor = zip(names, master.sizes, strict=True)
        rates, decays, adam = zip(*(self._settings(name, size) for name, size in per_tensor), strict=True)
        self._rates, self._decays, self._adam = (torch.cat(x).to(master.flat.device) for x in (rates, decays, adam))
        self._blend = 1 - MOMENTUM + (MOMENTUM - BETAS[0]) * self._adam

    def _settings(self, name: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
        matrix = len(self.master.shapes[name]) > 1 and not name.endswith("conv1d.weight")
        rate = EMBEDDING_SCALE if name == "embed_tokens.weight" else TOWER_SCALE if is_vision(name) else 1.0
        return (torch.full((size,), rate), torch.full((size,), WEIGHT_DECAY if matrix else 0.0),
                torch.full((size,), 0.0 if name in self._inner else 1.0))

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float) -> None:
        """One update with learning rate `rate`."""
        self.steps += 1
        flat = self.master.flat
        self.first.lerp_(gradient, self._blend)
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        corrected = (self.second / (1 - BETAS[1] ** self.steps)).sqrt_().add_(EPS)
        update = self._adam * self.first / corrected / (1 - BETAS[0] ** self.steps)
        self._orthogonalise(update, gradient)
        flat.mul_(1 - rate * self._decays).sub_(rate * self._rates * update)

    def _orthogonalise(self, update: Tensor, gradient: Tensor) -> None:
        """Writes the steps of the inner matrices into `update`, matrices of one shape together."""
        momentum = self.master.views(self.first)
        targets, gradients = self.master.views(update), self.master.views(gradient)
        shapes: dict[tuple[int, ...], list[str]] = {}
        for name in self._inner:
            shapes.setdefault(self.master.shapes[name], []).append(name)
        low = torch.bfloat16 if update.is_cuda else update.dtype
        for shape, names in shapes.items():
            ahead = torch.stack([gradients[n] * (1 - MOMENTUM) + momentum[n] * MOMENTUM for n in names])
            steps = orthogonal(ahead.to(low)).to(update.dtype) * (0.2 * max(shape[-2:]) ** 0.5)
            for name, one in zip(names, steps, strict=True):
                targets[name].copy_(one)
