"""THE STAGE TABLE, shipped half: name, candidate and compare rule of everything that is checked against the reference.

tests/stages.py holds the other half, reference and inputs per name. Rows go from kernels up to generation, so the
first that diverges is the cause. A row for every op of csrc/kernels.h, and for the quantisers, mixers and whole small
models. Arrays are named as in kernels.h; sizes and factors come as arrays without dimensions. NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

from fermi_engine import kernels, runs
from fermi_engine import stage_cpu as cpu
from fermi_engine.compare import All, Arrays, Divergence, Exact, Rounding, Rule, Tokens, TwiceReference, Ulp
from fermi_engine.stage_cpu import Compute
from fermi_engine.stage_limits import (
    COS_ULP,
    DELTA_STEP,
    DENSE,
    EXP_ULP,
    FEED_FORWARD,
    GATED_ATTENTION,
    GATED_DELTA_NET,
    GATES,
    LOG1P_ULP,
    LOGISTIC,
    NORM,
    SILU,
    SIN_ULP,
    SWIGLU,
    block_gain,
    block_sum,
    cached_size,
    chosen_softmax,
    conv_silu,
    decoder_chain,
    lane_dot,
    read_size,
    score_softmax,
    term_count,
    up_gain,
    value_size,
    weighted_rows,
    x_gain,
)


@dataclass(frozen=True)
class Stage:
    """One row. `op` is the kernel it is about, None above kernels; compute(kernels, inputs) gives the outputs."""

    name: str
    op: str | None
    compute: Compute
    compare: Rule

    def candidate(self, arrays: Arrays, backend: str | None = None, threads: int | None = None) -> Arrays:
        """Outputs of the engine by name. Raises BackendError where `backend` cannot run."""
        return self.compute(kernels.get(backend, threads), arrays)


_MATMUL = All(Rounding(block_sum, block_gain), isums=Exact())
_GROUPED = Rounding(block_sum, block_gain)
_DELTA_RULE = All(o=TwiceReference(DELTA_STEP, read_size), state=TwiceReference(DELTA_STEP, value_size))


def _kernel(name: str, compute: Compute, compare: Rule) -> Stage:
    return Stage(name, name, compute, compare)


STAGES = (
    #       name                      candidate                               compare
    _kernel("exp_f32",                cpu.elementwise("exp_f32"),             Ulp(EXP_ULP)),
    _kernel("log1p_f32",              cpu.elementwise("log1p_f32"),           Ulp(LOG1P_ULP)),
    _kernel("sin_f32",                cpu.elementwise("sin_f32"),             Ulp(SIN_ULP)),
    _kernel("cos_f32",                cpu.elementwise("cos_f32"),             Ulp(COS_ULP)),
    Stage("q4_0_quantize",            None, cpu.quantize("q4_0"),             Exact()),
    Stage("q8_0_quantize",            None, cpu.quantize("q8_0"),             Exact()),
    Stage("f16_quantize",             None, cpu.quantize("f16"),              Exact()),
    _kernel("quantize_q8_0",          cpu.quantize_q8_0,                      Exact()),
    _kernel("gemv_q4_0_q8_0",         cpu.product("gemv_q4_0_q8_0", "q4_0"),  _MATMUL),
    _kernel("gemm_q4_0_q8_0",         cpu.product("gemm_q4_0_q8_0", "q4_0"),  _MATMUL),
    _kernel("gemv_q8_0_q8_0",         cpu.product("gemv_q8_0_q8_0", "q8_0"),  _MATMUL),
    _kernel("gemm_q8_0_q8_0",         cpu.product("gemm_q8_0_q8_0", "q8_0"),  _MATMUL),
    _kernel("grouped_gemm_q4_0_q8_0", cpu.grouped_product("q4_0"),            _GROUPED),
    _kernel("grouped_gemm_q8_0_q8_0", cpu.grouped_product("q8_0"),            _GROUPED),
    _kernel("dequantize_q4_0",        cpu.dequantize("q4_0"),                 Exact()),
    _kernel("dequantize_q8_0",        cpu.dequantize("q8_0"),                 Exact()),
    _kernel("dequantize_f16",         cpu.dequantize("f16"),                  Exact()),
    _kernel("gemm_f32",               cpu.gemm_f32,                           Rounding(lane_dot, term_count)),
    _kernel("rms_norm",               cpu.rms_norm,                           TwiceReference(NORM)),
    _kernel("gated_rms_norm",         cpu.gated_rms_norm,                     TwiceReference(NORM + SILU)),
    _kernel("l2_norm",                cpu.l2_norm,                            TwiceReference(NORM)),
    _kernel("gdn_gates",              cpu.gdn_gates,                          All(g=Rounding(GATES), beta=Rounding(LOGISTIC))),
    _kernel("conv1d_silu",            cpu.conv1d_silu,                        All(y=Rounding(conv_silu), tail=Exact())),
    _kernel("gdn_recurrent",          cpu.gdn_recurrent,                      _DELTA_RULE),
    _kernel("rope_tables",            cpu.rope_tables,                        All(cos=Ulp(COS_ULP), sin=Ulp(SIN_ULP))),
    _kernel("rope",                   cpu.rope,                               Rounding(2)),
    _kernel("kv_append",              cpu.kv_append,                          Exact()),
    _kernel("attention",              cpu.attention,                          TwiceReference(score_softmax, cached_size)),
    _kernel("router_topk",            cpu.router_topk,                        All(ids=Exact(), weights=Rounding(chosen_softmax))),
    _kernel("expert_rows",            cpu.expert_rows,                        Exact()),
    _kernel("swiglu",                 cpu.swiglu,                             Rounding(SWIGLU, up_gain)),
    _kernel("sigmoid_mul",            cpu.sigmoid_mul,                        Rounding(LOGISTIC + 1, x_gain)),
    _kernel("moe_combine",            cpu.moe_combine,                        Rounding(weighted_rows)),
    _kernel("add",                    cpu.add,                                Exact()),
    Stage("gated_delta_net",          None, runs.gated_delta_net,             TwiceReference(GATED_DELTA_NET)),
    Stage("gated_attention",          None, runs.gated_attention,             TwiceReference(GATED_ATTENTION)),
    Stage("dense_mlp",                None, runs.dense_mlp,                   TwiceReference(DENSE)),
    Stage("sparse_moe",               None, runs.sparse_moe,                  All(TwiceReference(FEED_FORWARD), ids=Exact())),
    Stage("decoder",                  None, runs.decoder,                     TwiceReference(decoder_chain)),
    Stage("decoder_q4_0",             None, runs.decoder_q4_0,                All(logits=Divergence(), digest=Exact())),
    Stage("snapshot_resume",          None, runs.resumed,                     Exact()),
    Stage("generate",                 None, runs.greedy,                      Tokens()),
)


def find_stage(name: str) -> Stage:
    """The row called `name`. Raises KeyError."""
    return next(stage for stage in STAGES if stage.name == name)
