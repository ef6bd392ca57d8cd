"""HybridState: everything a sequence leaves behind after its tokens have passed, at one position.

Gated DeltaNet layers keep the last conv inputs and the recurrent state; attention layers keep keys and values in pages.
A recurrent state cannot be rewound, so all parts always stand at the same token count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fermi_engine.config import ModelConfig


@dataclass
class DeltaState:
    """conv: last taps-1 inputs of the convolution [taps-1, C], zeros before the first token; recurrent [HV, K, V]."""

    conv: np.ndarray
    recurrent: np.ndarray

    def copy(self) -> DeltaState:
        return DeltaState(self.conv.copy(), self.recurrent.copy())


@dataclass
class KVPages:
    """Keys and values in pages of `page_tokens` positions, each [kv_heads, page_tokens, D]; unused rows are zero."""

    kv_heads: int
    page_tokens: int
    head_dim: int
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def append(self, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Write k, v [T, kv_heads, D] at positions start.. ; pages are added as needed."""
        end = start + k.shape[0]
        while len(self.keys) * self.page_tokens < end:
            shape = (self.kv_heads, self.page_tokens, self.head_dim)
            self.keys.append(np.zeros(shape, np.float32))
            self.values.append(np.zeros(shape, np.float32))
        at = start
        while at < end:
            page, row = divmod(at, self.page_tokens)
            count = min(self.page_tokens - row, end - at)
            source = slice(at - start, at - start + count)
            self.keys[page][:, row : row + count] = k[source].transpose(1, 0, 2)
            self.values[page][:, row : row + count] = v[source].transpose(1, 0, 2)
            at += count

    def filled(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the first `length` positions, [length, kv_heads, D] each: for checks, page size forgotten."""
        if not self.keys:
            empty = np.zeros((0, self.kv_heads, self.head_dim), np.float32)
            return empty, empty
        join = [np.concatenate(pages, axis=1)[:, :length].transpose(1, 0, 2) for pages in (self.keys, self.values)]
        return join[0], join[1]

    def copy(self) -> KVPages:
        return KVPages(
            self.kv_heads,
            self.page_tokens,
            self.head_dim,
            [page.copy() for page in self.keys],
            [page.copy() for page in self.values],
        )


@dataclass
class HybridState:
    """State of all layers after `position` tokens; `layers[i]` is a DeltaState or KVPages by the layer's type."""

    position: int
    layers: list[DeltaState | KVPages]

    @classmethod
    def fresh(cls, config: ModelConfig, kv_block: int) -> HybridState:
        """The state before the first token."""
        return cls(0, [_fresh_layer(config, kind, kv_block) for kind in config.layer_types])

    def copy(self) -> HybridState:
        """Independent deep copy."""
        return HybridState(self.position, [layer.copy() for layer in self.layers])

    def arrays(self) -> dict[str, np.ndarray]:
        """Every value of the state by name, page size forgotten; equal states give equal bytes."""
        named: dict[str, np.ndarray] = {"position": np.array([self.position])}
        for i, layer in enumerate(self.layers):
            if isinstance(layer, DeltaState):
                named[f"layers.{i}.conv"], named[f"layers.{i}.recurrent"] = layer.conv, layer.recurrent
            else:
                named[f"layers.{i}.k"], named[f"layers.{i}.v"] = layer.filled(self.position)
        return named


def _fresh_layer(c: ModelConfig, kind: str, kv_block: int) -> DeltaState | KVPages:
    if kind == "full_attention":
        return KVPages(c.num_key_value_heads, kv_block, c.head_dim)
    conv = np.zeros((c.linear_conv_kernel_dim - 1, c.conv_dim), np.float32)
    shape = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    return DeltaState(conv, np.zeros(shape, np.float32))
