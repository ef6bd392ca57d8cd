"""THE STAGE TABLE, shipped half: name, candidates and compare rule of everything that is checked against the reference.

tests/stages.py holds the other half, reference and inputs per name. Rows go from kernels up to generation, so the first that
diverges is the cause; then images, from pixels to prompts. A row for every op of csrc/kernels.h and csrc/sm20/ops.h, and for the
quantisers, mixers and whole small models. A row runs on the CPU's backends, on sm_20 (`emulated`, `cuda`) or on both: that is a
property of the row. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fermi_engine import kernels
from fermi_engine.compare import (
    All,
    Arrays,
    Case,
    Divergence,
    Exact,
    Rounding,
    Rule,
    Tokens,
    TwiceReference,
    Ulp,
    Verdict,
)
from fermi_engine.errors import BackendError
from fermi_engine.kernels.dispatch import BACKENDS
from fermi_engine.stages import (
    cpu,
    device_run,
    gpu,
    gpu_runs,
    gpu_vision_runs,
    products,
    runs,
    token,
    vision,
    vision_runs,
)
from fermi_engine.stages.device_run import DEVICES
from fermi_engine.stages.limits import (
    BLOCK,
    CPU,
    GELU_BIAS,
    GELU_ERF_ULP,
    GELU_TANH_ULP,
    LAYER_NORM,
    NORM,
    SM20,
    TAPS,
    Arithmetic,
    block_gain,
    block_sum,
    group_sum,
    mean_size,
    mean_sum,
    position_size,
    position_sum,
    token_normed,
    token_product,
    token_terms,
    token_value,
    turned_size,
    up_gain,
    value_size,
    x_gain,
)

CPU_BACKENDS = tuple(backend.name for backend in BACKENDS)
By = Rule | Callable[[Arithmetic], Rule]  # one rule for all, or one made from a family's arithmetic


@dataclass(frozen=True)
class Form:
    """How a row runs on one family of backends. compute(kernels, inputs) gives outputs by name, with a CpuKernels or a
    DeviceRun; `ops` are the kernels it is about, entry points on sm_20, none above kernels; `outputs` those of the reference
    that it gives, all where none are named."""

    compute: Callable[[Any, Arrays], Arrays]
    compare: Rule
    ops: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def judge(self, got: Arrays, case: Case) -> Verdict:
        """Verdict on `got`."""
        named = self.outputs or case.outputs
        return self.compare.judge(got, case._replace(outputs={name: case.outputs[name] for name in named}))


@dataclass(frozen=True)
class Stage:
    """One row: its form on the CPU and on sm_20, None where it has none."""

    name: str
    cpu: Form | None
    gpu: Form | None

    def form(self, backend: str | None = None) -> Form | None:
        """The form for `backend` (None: the CPU's best)."""
        return self.gpu if backend in DEVICES else self.cpu

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that it has a form for, whether this machine can run it or not."""
        return (CPU_BACKENDS if self.cpu else ()) + (DEVICES if self.gpu else ())

    @property
    def compare(self) -> Rule:
        """The rule of the CPU's form, or of the only one."""
        return (self.cpu or self.gpu).compare

    def candidate(self, arrays: Arrays, backend: str | None = None, threads: int | None = None) -> Arrays:
        """Outputs of the engine by name. Raises BackendError or DeviceError where `backend` cannot run this row."""
        form = self.form(backend)
        if form is None:
            raise BackendError(f"stage {self.name} has no form for {backend or 'the CPU'}; it runs on {', '.join(self.backends)}")
        with opened(backend, threads) as found:
            return form.compute(found, arrays)


@contextmanager
def opened(backend: str | None, threads: int | None = None) -> Iterator[Any]:
    """What forms compute with on `backend`: a CpuKernels, or a DeviceRun on a device of its own."""
    if backend in DEVICES:
        with device_run.opened(backend) as run:
            yield run
    else:
        yield kernels.get(backend, threads)


def _rule(compare: By, arithmetic: Arithmetic) -> Rule:
    return compare if isinstance(compare, Rule) else compare(arithmetic)


def _kernel(name: str, compute: cpu.Compute | None, device: gpu.Candidate | None, compare: By) -> Stage:
    """A row about kernels: on the CPU that of its name."""
    return Stage(name, compute and Form(compute, _rule(compare, CPU), (name,)),
                 device and Form(device.compute, _rule(compare, SM20), device.entries, device.outputs))


def _again(name: str, compute: cpu.Compute, device: gpu.Candidate, compare: By) -> Stage:
    """Another row about a kernel that has one of its name on the CPU."""
    return Stage(name, Form(compute, _rule(compare, CPU)),
                 Form(device.compute, _rule(compare, SM20), device.entries, device.outputs))


def _above(name: str, compute: cpu.Compute, device: gpu.Compute | None, compare: By) -> Stage:
    """A row above kernels, or about no kernel."""
    return Stage(name, Form(compute, _rule(compare, CPU)), device and Form(device, _rule(compare, SM20)))


_MATMUL = All(Rounding(block_sum, block_gain), isums=Exact())
_GROUPED = Rounding(block_sum, block_gain)


def _token_product(on: Arithmetic) -> Rule:
    plain = Rounding(token_product, token_terms)
    return All(Rounding(token_normed, token_terms), plain=plain, wide=plain, swiglu=Rounding(on.token_swiglu))


STAGES = (
    #       name               CPU                           sm_20                        compare
    _kernel("exp_f32",         cpu.elementwise("exp_f32"),   None,                        lambda on: Ulp(on.exp_ulp)),
    _kernel("log1p_f32",       cpu.elementwise("log1p_f32"), None,                        lambda on: Ulp(on.log1p_ulp)),
    _kernel("sin_f32",         cpu.elementwise("sin_f32"),   None,                        lambda on: Ulp(on.sin_ulp)),
    _kernel("cos_f32",         cpu.elementwise("cos_f32"),   None,                        lambda on: Ulp(on.cos_ulp)),
    _kernel("gelu_tanh",       cpu.elementwise("gelu_tanh"), vision.gelu("gelu_tanh"),    Ulp(GELU_TANH_ULP)),
    _kernel("gelu_erf",        cpu.elementwise("gelu_erf"), vision.gelu("gelu_erf"),      Ulp(GELU_ERF_ULP)),
    _above("q4_0_quantize",    cpu.quantize("q4_0"),         None,                        Exact()),
    _above("q4_0_mse",         cpu.quantize_mse,             None,                        Exact()),
    _above("q8_0_quantize",    cpu.quantize("q8_0"),         None,                        Exact()),
    _above("f16_quantize",     cpu.quantize("f16"),          None,                        Exact()),
    _kernel("quantize_q8_0",   cpu.quantize_q8_0,            None,                        Exact()),
    _kernel("gemv_q4_0_q8_0",  cpu.product("gemv_q4_0_q8_0", "q4_0"), None,               _MATMUL),
    _kernel("gemm_q4_0_q8_0",  cpu.product("gemm_q4_0_q8_0", "q4_0"), None,               _MATMUL),
    _kernel("gemv_q8_0_q8_0",  cpu.product("gemv_q8_0_q8_0", "q8_0"), None,               _MATMUL),
    _kernel("gemm_q8_0_q8_0",  cpu.product("gemm_q8_0_q8_0", "q8_0"), None,               _MATMUL),
    _kernel("grouped_gemm_q4_0_q8_0", cpu.grouped_product("q4_0"), None,                  _GROUPED),
    _kernel("grouped_gemm_q8_0_q8_0", cpu.grouped_product("q8_0"), None,                  _GROUPED),
    _kernel("dequantize_q4_0", cpu.dequantize("q4_0"),       products.dequantize("q4_0"), Exact()),
    _kernel("dequantize_q8_0", cpu.dequantize("q8_0"),       products.dequantize("q8_0"), Exact()),
    _kernel("dequantize_f16",  cpu.dequantize("f16"),        products.dequantize("f16"),  Exact()),
    _kernel("gemm_f32",        cpu.gemm_f32,                 products.gemm_f32,           lambda on: Rounding(*on.dot)),
    _kernel("rms_norm",        cpu.rms_norm,                 gpu.rms_norm,                TwiceReference(NORM)),
    _kernel("layer_norm",      cpu.layer_norm,               vision.layer_norm,           TwiceReference(LAYER_NORM)),
    _kernel("gated_rms_norm",  cpu.gated_rms_norm,           gpu.gated_rms_norm,
            lambda on: TwiceReference(NORM + on.silu)),
    _kernel("l2_norm",         cpu.l2_norm,                  gpu.l2_norm,                 TwiceReference(NORM)),
    _kernel("gdn_gates",       cpu.gdn_gates,                gpu.gdn_gates,
            lambda on: All(g=Rounding(on.gates), beta=Rounding(on.logistic))),
    _kernel("conv1d_silu",     cpu.conv1d_silu,              gpu.conv1d_silu,
            lambda on: All(y=Rounding(on.conv_silu), tail=Exact())),
    _kernel("gdn_recurrent",   cpu.gdn_recurrent,            gpu.gdn_step,                lambda on: on.delta_rule),
    _kernel("rope_tables",     cpu.rope_tables,              gpu.rope_tables,
            lambda on: All(cos=Ulp(on.cos_ulp), sin=Ulp(on.sin_ulp))),
    _kernel("rope",            cpu.rope,                     gpu.rope,                    Rounding(2)),
    _kernel("kv_append",       cpu.kv_append,                gpu.kv_append,               Exact()),
    _kernel("attention",       cpu.attention,                gpu.attention,
            lambda on: TwiceReference(on.score_softmax, on.cached_size)),
    _kernel("full_attention",  cpu.full_attention,           vision.full_attention,
            lambda on: TwiceReference(on.window_softmax, value_size)),
    _kernel("router_topk",     cpu.router_topk,              gpu.router_topk,
            lambda on: All(ids=Exact(), weights=Rounding(on.chosen_softmax))),
    _kernel("expert_rows",     cpu.expert_rows,              gpu.expert_rows,             Exact()),
    _kernel("swiglu",          cpu.swiglu,                   gpu.swiglu,
            lambda on: Rounding(on.swiglu, up_gain)),
    _kernel("sigmoid_mul",     cpu.sigmoid_mul,              gpu.sigmoid_mul,
            lambda on: Rounding(on.logistic + 1, x_gain)),
    _kernel("moe_combine",     cpu.moe_combine,              gpu.moe_combine,             lambda on: Rounding(on.weighted_rows)),
    _kernel("add",             cpu.add,                      gpu.add,                     Exact()),
    _kernel("add_bias",        cpu.add_bias,                 vision.add_bias,             Exact()),
    _kernel("group_mean",      cpu.group_mean,               vision.group_mean,           Rounding(group_sum)),
    _kernel("embed",           None,                         products.embed,              Exact()),
    _kernel("gemm_f32_tiles",  None,                         products.tiles("f32"),       lambda on: Rounding(*on.dot)),
    _kernel("gemm_q4_0",       None,                         products.tiles("q4_0"),      lambda on: Rounding(*on.dot)),
    _kernel("gemm_q8_0",       None,                         products.tiles("q8_0"),      lambda on: Rounding(*on.dot)),
    _kernel("gemv_rows_q4_0",  None,                         products.gemv_rows("q4_0"),  lambda on: Rounding(*on.dot)),
    _kernel("gemv_rows_q8_0",  None,                         products.gemv_rows("q8_0"),  lambda on: Rounding(*on.dot)),
    _kernel("grouped_tiles",   None,                         products.grouped_tiles,      Exact()),
    _kernel("grouped_gemm_q4_0", None,                       products.grouped_gemm("q4_0"), lambda on: Rounding(*on.dot)),
    _kernel("grouped_gemm_q8_0", None,                       products.grouped_gemm("q8_0"), lambda on: Rounding(*on.dot)),
    _again("attention_long",   cpu.attention,                gpu.attention,
            lambda on: TwiceReference(on.score_softmax, on.cached_size)),
    _kernel("gdn_chunk",       None,                         gpu.gdn_chunk,               lambda on: on.delta_rule),
    _kernel("token_gemv_f32",  None,                         token.token_gemv("f32"),     _token_product),
    _kernel("token_gemv_q4_0", None,                         token.token_gemv("q4_0"),    _token_product),
    _kernel("token_gemv_q8_0", None,                         token.token_gemv("q8_0"),    _token_product),
    _kernel("gdn_token",       None,                         token.gdn_token,
            lambda on: All(TwiceReference(on.delta_token), tail=Exact())),
    _kernel("token_attention", None,                         token.token_attention,
            lambda on: All(y=TwiceReference(on.token_attention, token_value), k=TwiceReference(NORM + 3), v=Exact())),
    _kernel("argmax",          None,                         token.argmax,                Exact()),
    _kernel("gelu_bias",       None,                         vision.gelu_bias,            TwiceReference(GELU_BIAS)),
    _kernel("add_bias_residual", None,                       vision.add_bias_residual,    Exact()),
    _kernel("add_bias_rope",   None,                         vision.add_bias_rope,        TwiceReference(1 + 2, turned_size)),
    _kernel("add_positions",   None,                         vision.add_positions,
            All(plain=Exact(), weighted=TwiceReference(position_sum, position_size))),
    _kernel("mean_residual",   None,                         vision.mean_residual,        TwiceReference(mean_sum, mean_size)),
    _kernel("view_attention",  None,                         vision.view_attention,
            lambda on: TwiceReference(on.view_softmax, value_size)),
    _kernel("window_attention", None,                        vision.window_attention,
            lambda on: TwiceReference(on.window_softmax, value_size)),
    _above("gated_delta_net",  runs.gated_delta_net,         None,
            lambda on: TwiceReference(on.gated_delta_net)),
    _above("gated_attention",  runs.gated_attention,         None,
            lambda on: TwiceReference(on.gated_attention)),
    _above("dense_mlp",        runs.dense_mlp,               None,                        lambda on: TwiceReference(on.dense)),
    _above("sparse_moe",       runs.sparse_moe,              None,
            lambda on: All(TwiceReference(on.feed_forward), ids=Exact())),
    _above("delta_net_block",  runs.delta_net_block,         gpu_runs.delta_net_block,
            lambda on: TwiceReference(BLOCK + on.gated_delta_net)),
    _above("attention_block",  runs.attention_block,         gpu_runs.attention_block,
            lambda on: TwiceReference(BLOCK + on.gated_attention)),
    _above("mlp_block",        runs.mlp_block,               gpu_runs.mlp_block,
            lambda on: TwiceReference(BLOCK + on.dense)),
    _above("moe_block",        runs.moe_block,               gpu_runs.moe_block,
            lambda on: All(TwiceReference(BLOCK + on.feed_forward), ids=Exact())),
    _above("decoder",          runs.decoder,                 None,
            lambda on: TwiceReference(on.decoder_chain)),
    _above("prefill",          runs.prefill,                 gpu_runs.prefill,
            lambda on: TwiceReference(on.decoder_chain)),
    _above("decode",           runs.decode,                  gpu_runs.decode,
            lambda on: TwiceReference(on.decoder_chain)),
    _above("decoder_q4_0",     runs.decoder_q4_0,            None,
            All(logits=Divergence(), digest=Exact())),
    _above("snapshot_resume",  runs.resumed,                 None,                        Exact()),
    _above("generate",         runs.greedy,                  None,                        Tokens()),
    _above("image_patches",    vision_runs.image_patches,    None,                        Exact()),
    _above("vision_positions", vision_runs.vision_positions, None,
            lambda on: All(Exact(), table=TwiceReference(TAPS), cos=Ulp(on.cos_ulp), sin=Ulp(on.sin_ulp))),
    _above("qwen_block",       vision_runs.qwen_block,       gpu_vision_runs.qwen_block,
            lambda on: TwiceReference(on.vision_block)),
    _above("minicpm_layer",    vision_runs.minicpm_layer,    gpu_vision_runs.minicpm_layer,
            lambda on: TwiceReference(on.vision_block)),
    _above("window_merger",    vision_runs.window_merger,    gpu_vision_runs.window_merger,
            lambda on: TwiceReference(on.vision_block)),
    _above("qwen_tower",       vision_runs.qwen_tower,       gpu_vision_runs.qwen_tower,
            lambda on: TwiceReference(on.vision_tower)),
    _above("minicpm_tower",    vision_runs.minicpm_tower,    gpu_vision_runs.minicpm_tower,
            lambda on: TwiceReference(on.vision_tower)),
    _above("image_prompt",     vision_runs.image_prompt,     None,
            lambda on: TwiceReference(on.decoder_chain)),
)


def find_stage(name: str) -> Stage:
    """The row called `name`. Raises KeyError."""
    return next(stage for stage in STAGES if stage.name == name)
