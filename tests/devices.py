"""Which devices a test runs on: the emulated ones always, `cuda` (marked `gpu`) where there is a card or `-m gpu` demands one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from fermi_engine.errors import DeviceError
from fermi_engine.kernels.gpu import open_device


@functools.cache
def no_cuda() -> str | None:
    """Why there is no CUDA device here; None where there is one."""
    try:
        open_device("cuda").close()
    except DeviceError as err:
        return str(err)
    return None


def on_devices(metafunc: pytest.Metafunc, fixture: str, emulated: Sequence[str], scope: str | None = None) -> None:
    """Run the test at hand, if it asks for `fixture`, with each of `emulated` and on the card as the fixture's parameter."""
    if fixture in metafunc.fixturenames:
        wanted = "gpu" in metafunc.config.getoption("-m") or no_cuda() is None
        card: list[Any] = [pytest.param("cuda", marks=pytest.mark.gpu)] if wanted else []
        metafunc.parametrize(fixture, [*emulated, *card], indirect=True, scope=scope)
