"""Errors a user can cause or can mend. The command line prints their one line and exits with status 2.

Each message names the thing, what was found (and expected), and the remedy. Anything else that escapes is a defect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FermiError(Exception):
    """Base of every error with a remedy; its text is one line."""


class ConfigError(FermiError):
    """A model or engine configuration that cannot work."""


class CheckpointError(FermiError):
    """A Hugging Face checkpoint directory that is incomplete, damaged or of an unknown layout."""


class FormatError(FermiError):
    """Weights that a format cannot hold: NaN, infinity, an overflowing scale, a row length off the block size."""


class PackError(FermiError):
    """A pack that is damaged, unfinished, from another version, or no pack at all."""


class BackendError(FermiError):
    """A backend that was asked for and cannot run here."""


class TokenizerError(FermiError):
    """Text was asked for and the model carries no (usable) tokenizer or chat template."""


class RequestError(FermiError):
    """A prompt or a setting that cannot be served: too long, unknown ids, NaN settings."""


class ImageError(FermiError):
    """An image that cannot be read, or whose size the model does not take."""


class VerifyError(FermiError):
    """Golden files or a dump that cannot be replayed."""


class DeviceError(FermiError):
    """A GPU, or its emulation, that is absent, too small, unsupported, or failed at a call."""


class DeviceMemoryError(DeviceError):
    """Device or page-locked host memory that is not there."""


class SnapshotError(FermiError):
    """A snapshot or session file that is damaged, of something else, or cannot be written."""


@contextmanager
def offering(option: str, does: str) -> Iterator[None]:
    """A DeviceError inside goes up with an `option` of the command line and what that does, unless it names it already."""
    try:
        yield
    except DeviceError as err:
        raise err if option in str(err) else type(err)(f"{err}; {option} {does}") from None
