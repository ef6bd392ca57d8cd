"""References of the vision stages: kernels of towers, image patches, positions, parts of towers and towers, image prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from torch import Tensor

from fermi_engine.compare import Arrays
from fermi_engine.stages.vision_runs import VISION
from reference import resize, rope, vision, vision_minicpm, vision_qwen
from tests import vision_inputs as draw
from tests.model_stages import decided, decoder_of
from tests.oracle import Oracle, Tensors, floats
from tests.strategies import EDGES, edges, few, lengths

Grids = list[tuple[int, int]]


def config_of(a: Tensors) -> SimpleNamespace:
    return SimpleNamespace(**json.loads(bytes(a[VISION].tolist())))


def grids_of(a: Tensors) -> Grids:
    return [(int(height), int(width)) for height, width in a["grids"]]


def qwen_of(a: Tensors, dtype: torch.dtype) -> vision_qwen.QwenVision:
    """Over the arrays; a part of a tower lacks the position table, whose dtype would tell."""
    named = {name.removeprefix("visual."): w.to(dtype) for name, w in a.items() if name.startswith("visual.")}
    return vision_qwen.QwenVision(config_of(a), {"pos_embed.weight": torch.zeros((), dtype=dtype), **named})


def minicpm_of(a: Tensors, dtype: torch.dtype) -> vision_minicpm.MiniCpmVision:
    table = {"vision_tower.embeddings.position_embedding.weight": torch.zeros((), dtype=dtype)}
    named = {name: w.to(dtype) for name, w in a.items() if name.startswith(("vision_tower.", "merger."))}
    return vision_minicpm.MiniCpmVision(config_of(a), table | named)


# Kernels


def _layer_norm(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": vision.layer_norm(*floats(a, dtype, "x", "w", "b"), float(a["eps"]))}


def _full_attention(a: Tensors, dtype: torch.dtype) -> Tensors:
    window = int(a["window"])
    parts = (x.unflatten(0, (-1, window)) for x in floats(a, dtype, "q", "k", "v"))
    return {"o": vision.attend(*parts).flatten(0, 1)}


def _add_bias(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"x": a["x"] + a["b"]}  # one IEEE operation: float32 in the truth, too


def _group_mean(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": a["x"].to(dtype).unflatten(0, (-1, int(a["group"]))).mean(1)}


def _group_bound(a: Tensors) -> Arrays:
    return {"y": a["x"].double().abs().unflatten(0, (-1, int(a["group"]))).mean(1).numpy()}


def _view_attention(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"o": vision.attend_each(*floats(a, dtype, "q", "k", "v"), a["lengths"].tolist())}


def _gelu_bias(a: Tensors, dtype: torch.dtype) -> Tensors:
    x = a["x"].to(dtype) + a["b"].to(dtype)
    return {"gelu_tanh": vision.gelu_tanh(x), "gelu_erf": vision.gelu_erf(x)}


def _bias_residual(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"x": a["x"] + (a["y"] + a["b"])}  # float32 in the truth, too


def _bias_rope(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, b, cos, sin = floats(a, dtype, "x", "b", "cos", "sin")
    q, k, v = (x + b).unflatten(1, (3, -1, 2 * cos.shape[1])).unbind(1)
    return {"x": torch.stack([rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v], 1).flatten(1)}


def _add_positions(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, b, table, weights = floats(a, dtype, "x", "b", "table", "weights")
    read = (table[a["rows"].long()] * weights[..., None]).sum(1)
    return {"weighted": x + b + read, "plain": (a["x"] + a["b"]) + a["table"][a["rows"][:, 0].long()]}


def _mean_residual(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, y, b = floats(a, dtype, "x", "y", "b")
    return {"y": y + b + x.unflatten(0, (-1, int(a["group"]))).mean(1)}


# Images


def _image_patches(a: Tensors, dtype: torch.dtype) -> Tensors:
    """float32 in the truth, too: a table of 256 samples, each rounded as transformers rounds."""
    table = ((torch.arange(256).double() * (1 / 255)).float() - 0.5) / 0.5
    q, m = int(a["qwen_patch"]), int(a["minicpm_patch"])
    views, grids = [], []
    for height, width, rows, columns in a["steps"].tolist():
        pixels = resize.resize(a["pixels"], height, width)
        tiles = pixels.unflatten(1, (columns, -1)).unflatten(0, (rows, -1)).permute(0, 2, 1, 3, 4).flatten(0, 1)
        patch = m if views else q
        views += [tile.unflatten(1, (-1, patch)).unflatten(0, (-1, patch)).transpose(1, 2) for tile in tiles]
        grids += [(height // rows // patch, width // columns // patch)] * (rows * columns)
    qwen = vision.blocks(views[0]).permute(0, 3, 1, 2)[:, :, None].expand(-1, -1, 2, -1, -1)
    minicpm = torch.cat([view.flatten(0, 1).permute(0, 3, 1, 2).flatten(1) for view in views[1:]])
    return {"qwen": table[qwen.flatten(1).long()], "minicpm": table[minicpm.long()],
            "qwen_grids": torch.tensor(grids[:1]), "minicpm_grids": torch.tensor(grids[1:])}


def _order_is_settled(a: Tensors) -> bool:
    """Every Pillow takes columns first."""
    return not any(resize.order_depends(a["pixels"], height, width) for height, width, *_ in a["steps"].tolist())


def _positions(a: Tensors, dtype: torch.dtype) -> Tensors:
    config, grids, table = config_of(a), grids_of(a), a["table"].to(dtype)
    head_dim = config.hidden_size // config.num_attention_heads
    cos, sin = (torch.cat(parts) for parts in zip(*(vision_qwen.rotary_tables(g, head_dim, dtype) for g in grids), strict=True))
    if dtype == torch.float64:  # of the float32 angle, as the kernel's accuracy is stated
        angles = [torch.cat([place.float()[:, None] * vision_qwen.rope.inv_freq(head_dim // 2, vision_qwen.THETA)
                             for place in vision.block_order(*g)], dim=-1) for g in grids]
        cos, sin = torch.cat(angles).double().cos(), torch.cat(angles).double().sin()
    text, following = vision_qwen.text_positions(a["ids"].tolist(), config.image_token_id, grids)
    return {"table": torch.cat([vision_qwen.position_embedding(table, g) for g in grids]), "cos": cos, "sin": sin,
            "buckets": torch.cat([vision_minicpm.position_ids(g, config.table_side) for g in grids]), "text": text.int(),
            "following": torch.tensor([following])}


# Towers


def _qwen_block(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, cos, sin = floats(a, dtype, "x", "cos", "sin")
    return {"y": qwen_of(a, dtype).block(0, x, cos, sin, [h * w for h, w in grids_of(a)])}


def _minicpm_layer(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": minicpm_of(a, dtype).layer(0, a["x"].to(dtype), [h * w for h, w in grids_of(a)])}


def _window_merger(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": minicpm_of(a, dtype).window_merger(a["x"].to(dtype), grids_of(a))}


def _qwen_tower(a: Tensors, dtype: torch.dtype) -> Tensors:
    seen: Tensors = {}
    y = qwen_of(a, dtype).forward(a["patches"].to(dtype), grids_of(a), seen.__setitem__)
    return {"blocks": seen[f"blocks.{config_of(a).num_hidden_layers - 1}"], "y": y}


def _minicpm_tower(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {mode: minicpm_of(a, dtype).forward(a["patches"].to(dtype), grids_of(a), mode) for mode in ("16x", "4x")}


# Prompts


def _prompt(a: Tensors, dtype: torch.dtype, seen: Tensors | None = None) -> Tensors:
    decoder, ids = decoder_of(a, dtype), torch.cat([a["ids"], a["after"]]).long()
    positions, _ = vision_qwen.text_positions(ids.tolist(), int(a["image_token"]), grids_of(a))
    embedded = decoder.embed(ids)
    embedded[ids == int(a["image_token"])] = a["rows"].to(dtype)
    trace = None if seen is None else seen.__setitem__
    return {"logits": decoder.forward(ids, positions=positions, embedded=embedded, trace=trace)[0]}


def _decided_prompt(a: Tensors) -> bool:
    seen: dict[str, Tensor] = {}
    _prompt(a, torch.float64, seen)
    return decided(seen, json.loads(bytes(a["config"].tolist()))["num_experts_per_tok"])


_GRIDS = st.sampled_from((((2, 2),), ((2, 6),), ((8, 2),), ((4, 6), (2, 2)), ((2, 4), (2, 4), (6, 2)), ((10, 8),)))
_GRIDS_OF_4 = st.sampled_from((((4, 4),), ((4, 8),), ((8, 4), (4, 4)), ((4, 8), (4, 8), (8, 4)), ((12, 8),)))
_HEADS = {"heads": st.sampled_from((1, 3)), "head_dim": st.sampled_from((8, 16, 24)), "mlp": st.sampled_from((5, 32, 50))}
_TOWER = {**_HEADS, "layers": st.sampled_from((1, 2, 3)), "patch": st.sampled_from((2, 3)),
          "side": st.sampled_from((1, 3, 7, 10)), "out": st.sampled_from((5, 16))}
_SOME = {"heads": 3, "head_dim": 8, "mlp": 50}

KERNEL_ORACLES: dict[str, Oracle] = {
    "layer_norm": Oracle(
        draw.layer_norm_rows, {"rows": few, "n": lengths, "edge": edges, "offset": st.sampled_from((0.0, 100.0))},
        {"rows": 7, "n": 163, "edge": "zero row", "offset": 0.0}, _layer_norm),
    "full_attention": Oracle(
        draw.window_operands, {"windows": st.integers(1, 5), "window": st.sampled_from((1, 2, 4, 5, 63, 64, 65, 130)),
                               "heads": st.integers(1, 4), "head_dim": st.integers(1, 40) | st.sampled_from((64, 72, 96)),
                               "edge": st.sampled_from(("sharp", *EDGES))},
        {"windows": 2, "window": 69, "heads": 2, "head_dim": 19, "edge": "sharp"}, _full_attention),
    "add_bias": Oracle(
        draw.bias_rows, {"rows": few, "n": lengths, "edge": edges}, {"rows": 5, "n": 53, "edge": "outlier"}, _add_bias),
    "group_mean": Oracle(
        draw.groups, {"rows": few, "group": st.integers(1, 5), "n": lengths, "edge": edges},
        {"rows": 5, "group": 4, "n": 53, "edge": "outlier"}, _group_mean, _group_bound),
}

_few_views = st.sampled_from(((1,), (4, 4), (5, 130, 1), (64, 65), (300,), (63, 129, 200)))

GPU_KERNEL_ORACLES: dict[str, Oracle] = {
    "gelu_bias": Oracle(
        draw.bias_rows, {"rows": few, "n": lengths, "edge": edges}, {"rows": 5, "n": 53, "edge": "plain"}, _gelu_bias),
    "add_bias_residual": Oracle(
        draw.residual_rows, {"rows": few, "n": lengths, "edge": edges}, {"rows": 5, "n": 53, "edge": "outlier"}, _bias_residual),
    "add_bias_rope": Oracle(
        draw.rope_rows, {"tokens": few, "heads": st.integers(1, 4), "half": st.integers(1, 40), "edge": edges},
        {"tokens": 5, "heads": 3, "half": 9, "edge": "plain"}, _bias_rope),
    "add_positions": Oracle(
        draw.position_operands, {"tokens": few, "n": lengths, "table": st.integers(1, 30), "taps": st.integers(1, 5),
                                 "edge": edges},
        {"tokens": 9, "n": 53, "table": 11, "taps": 4, "edge": "plain"}, _add_positions),
    "mean_residual": Oracle(
        draw.group_residuals, {"rows": few, "group": st.integers(1, 5), "n": lengths, "edge": edges},
        {"rows": 5, "group": 4, "n": 53, "edge": "plain"}, _mean_residual),
    "view_attention": Oracle(
        draw.view_operands, {"lengths": _few_views, "heads": st.integers(1, 3), "edge": st.sampled_from(("sharp", *EDGES)),
                             "head_dim": st.sampled_from((4, 8, 64, 72, 80, 144))},
        {"lengths": (5, 140, 64), "heads": 1, "head_dim": 80, "edge": "plain"}, _view_attention),
    "window_attention": Oracle(
        draw.window_operands, {"windows": st.integers(1, 20), "window": st.just(4), "heads": st.sampled_from((1, 3, 8, 9, 16)),
                               "head_dim": st.sampled_from((4, 8, 24, 64, 72, 144)), "edge": st.sampled_from(("sharp", *EDGES))},
        {"windows": 3, "window": 4, "heads": 9, "head_dim": 72, "edge": "plain"}, _full_attention),
}

VISION_ORACLES: dict[str, Oracle] = {
    "image_patches": Oracle(
        draw.image, {"height": st.integers(1, 90), "width": st.integers(1, 90), "qwen_patch": st.sampled_from((2, 4)),
                     "minicpm_patch": st.sampled_from((1, 2, 3))},
        {"height": 37, "width": 61, "qwen_patch": 2, "minicpm_patch": 2}, _image_patches, usable=_order_is_settled),
    "vision_positions": Oracle(
        draw.positions, {"grids": _GRIDS | st.just(((70, 2),)), "side": st.sampled_from((1, 2, 7, 48, 70)),
                         "head_dim": st.sampled_from((4, 8, 72)), "hidden": st.sampled_from((1, 5, 24)),
                         "text": st.integers(0, 4)},
        {"grids": ((6, 10), (2, 4), (14, 2)), "side": 10, "head_dim": 12, "hidden": 9, "text": 3}, _positions),
    "qwen_block": Oracle(draw.qwen_block, {"grids": _GRIDS, **_HEADS}, {"grids": ((6, 4), (2, 8)), **_SOME}, _qwen_block),
    "minicpm_layer": Oracle(
        draw.minicpm_layer, {"grids": _GRIDS, **_HEADS}, {"grids": ((4, 6), (2, 4), (2, 4)), **_SOME}, _minicpm_layer),
    "window_merger": Oracle(
        draw.window_merger, {"grids": _GRIDS, **_HEADS}, {"grids": ((4, 6), (2, 8)), **_SOME}, _window_merger),
    "qwen_tower": Oracle(
        draw.qwen_tower, {"grids": _GRIDS, **_TOWER},
        {"grids": ((6, 4), (2, 8)), "layers": 2, **_SOME, "patch": 2, "side": 7, "out": 20}, _qwen_tower),
    "minicpm_tower": Oracle(
        draw.minicpm_tower, {"grids": _GRIDS_OF_4, **_TOWER, "insert": st.integers(0, 2)},
        {"grids": ((8, 4), (4, 8), (4, 8)), "layers": 3, **_SOME, "patch": 3, "side": 10, "out": 20, "insert": 1},
        _minicpm_tower),
    "image_prompt": Oracle(
        draw.image_prompt,
        {"grids": st.sampled_from((((2, 2),), ((4, 6),), ((2, 6), (4, 2)))), "text": st.integers(1, 3), "cut": st.integers(0, 20),
         "after": st.integers(1, 3), "layers": st.sampled_from(("f", "lf")), "experts": st.sampled_from((0, 4))},
        {"grids": ((6, 4), (2, 8)), "text": 3, "cut": 7, "after": 3, "layers": "lf", "hidden": 24, "experts": 4, "vocab": 33},
        _prompt, usable=_decided_prompt),
}
