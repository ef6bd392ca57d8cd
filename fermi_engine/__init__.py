"""Hybrid Gated-DeltaNet MoE inference for old hardware, every stage checked against a reference.

The whole public API: Engine (a loaded model), Session (one timeline), SamplingParams, EngineConfig, and the errors.
Names resolve on first use, so that importing the package costs nothing and checks nothing.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "FermiError", "ModelConfig", "SamplingParams", "Session", "__version__"]

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "FermiError": "errors",
    "ModelConfig": "config",
    "SamplingParams": "sampling",
    "Session": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fermi_engine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"fermi_engine.{_HOMES[name]}"), name)
