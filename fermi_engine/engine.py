"""Engine: a loaded, immutable model. Sessions run on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from fermi_engine import kernels, memory, numa, report
from fermi_engine.config import EngineConfig, ModelConfig
from fermi_engine.errors import ConfigError, FermiError, RequestError, offering
from fermi_engine.formats import FORMATS
from fermi_engine.kernels.threads import cpus_to_pin, default_threads

if TYPE_CHECKING:
    from fermi_engine.generate import Stream
    from fermi_engine.gpu.choice import GpuChoice
    from fermi_engine.gpu.resident import Resident
    from fermi_engine.gpu.vision import GpuVision
    from fermi_engine.kernels.gpu import Device
    from fermi_engine.pack import Pack
    from fermi_engine.sampling import SamplingParams
    from fermi_engine.session import Session
    from fermi_engine.snapshots.cache import SnapshotCache
    from fermi_engine.snapshots.disk import DiskTier
    from fermi_engine.tokenizer import Tokenizer
    from fermi_engine.vision.encoder import Vision
    from fermi_engine.vision.patches import PreparedImage

SNAPSHOT_RAM = 4 << 30  # bytes at most, unless it is said otherwise


class Engine:
    """A pack bound to kernels. `decoder` is the model; `options` how it runs."""

    def __init__(self, pack: Pack, options: EngineConfig) -> None:
        from fermi_engine.model.decoder import Decoder

        self.pack, self.options = pack, options
        self.config: ModelConfig = pack.config
        count = options.threads or default_threads(hyper_threads=options.hyper_threads)
        self.kernels = kernels.get(options.backend, count)
        self.kernels.pin(cpus_to_pin(count, hyper_threads=options.hyper_threads) if options.pin else [])
        self.decoder = Decoder(pack, self.kernels, options.activations)
        self.gpu = self._gpu_choice()
        budget = self._snapshot_budget()
        self.disk = self._disk_tier(budget)
        self.snapshots = self._snapshot_cache(budget)
        self._device: Device | None = None
        self._resident: Resident | None = None
        self._parsing: Future[Tokenizer] | None = None

    def _snapshot_budget(self) -> int:
        """Bytes of memory for snapshots."""
        if self.options.snapshot_ram is not None:
            return self.options.snapshot_ram
        left = max(0, (memory.available() or 0) - self.pack.mapped.size)
        return min(SNAPSHOT_RAM, left // 2)

    def _snapshot_cache(self, budget: int) -> SnapshotCache | None:
        """States that prompts go on from; None where there is no room for one."""
        from fermi_engine.snapshots.cache import SnapshotCache
        from fermi_engine.state import HybridState

        least = HybridState.least_bytes(self.config, self.options.kv_block, self.options.kv_format) + 4 * self.config.vocab_size
        if budget >= least:
            return SnapshotCache(budget, self.disk)
        if self.options.snapshot_ram != 0:
            report.note(f"snapshots are off: {report.size(budget)} do not hold one, which takes {report.size(least)}; every "
                        "prompt is evaluated from its first token (--snapshot-ram)")
        return None

    def _disk_tier(self, memory_budget: int) -> DiskTier | None:
        """Where snapshots outlive the process. Those that wait for the disk hold no more than half of the memory."""
        options = self.options
        if options.snapshot_dir is None:
            return None
        from fermi_engine.snapshots import disk as snapshot_disk
        from fermi_engine.snapshots.prefix import NumericPath

        queue = min(snapshot_disk.QUEUE_BYTES, memory_budget // 2)
        numeric = NumericPath.of(self.pack_hash, options)
        return snapshot_disk.DiskTier(Path(options.snapshot_dir), options.snapshot_disk, self.config, numeric, options.kv_block,
                                      queue_bytes=queue)

    def _gpu_choice(self) -> GpuChoice | None:
        """Decides about prefill on the GPU; None where the CPU does all of it."""
        if self.options.prefill == "cpu" or self.options.decode == "gpu":
            return None
        from fermi_engine.gpu.choice import GpuChoice

        return GpuChoice(self.pack, self.decoder, self.options)

    @property
    def is_resident(self) -> bool:
        """Whether the GPU does everything."""
        return self.options.decode == "gpu"

    @property
    def resident(self) -> Resident:
        """The model on the GPU, where it is put when it is first asked for. Raises DeviceError."""
        from fermi_engine.gpu.resident import Resident
        from fermi_engine.kernels.gpu import open_device

        with offering("--decode cpu", "does without the GPU"):
            if self._device is None:
                self._device = open_device(self.options.device)
            if self._resident is None:
                options = self.options
                self._resident = Resident(self._device, self.pack, self.decoder, options.vram, options.gemm, self.context)
        return self._resident

    @classmethod
    def load(
        cls,
        path: str | Path,
        format: str | None = None,
        backend: str | None = None,
        threads: int | None = None,
        config: EngineConfig | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Engine:
        """Load a pack, or a checkpoint directory (converted once into a cache).

        format: 'q4_0' (default), 'q8_0', 'f16' or 'f32' for a directory; for a pack it must be absent or the pack's own.
        backend, threads: shorthands for the fields of `config`. progress(done_bytes, total_bytes, what): converting,
        reading, copying. On a machine with several memory nodes this sets the memory policy of the calling thread, for
        good, unless config.numa is 'off'.
        Raises PackError, CheckpointError, FormatError, ConfigError, BackendError.
        """
        options = config or EngineConfig()
        changes = {name: value for name, value in (("backend", backend), ("threads", threads)) if value is not None}
        options = dataclasses.replace(options, **changes)
        if format is not None and format not in FORMATS:
            raise ConfigError(f"unknown format {format!r}; choose from {', '.join(FORMATS)}")
        kernels.get(options.backend, options.threads)  # an impossible backend fails before minutes of conversion
        placement = numa.settle(options.numa)  # before anything is read and any thread is started
        pack = _open_pack(Path(path), format, progress)
        pack.place(lambda mapping, fd: memory.prepare(mapping, fd, placement, load=options.load, mlock=options.mlock,
                                                      huge_pages=options.huge_pages, progress=progress))
        return cls(pack, options)

    @property
    def pack_hash(self) -> str:
        """Seal of the pack: what ties a snapshot to its model."""
        return self.pack.hash

    @property
    def context(self) -> int:
        """Most tokens a session accepts."""
        return self.options.ctx_size or self.config.max_position_embeddings

    def prefetch(self, parsed: Future[Any] | None = None) -> None:
        """Begin with what the first request needs, in the background: to parse the tokenizer (0.7 s for 248,000 tokens)
        and to map the weights, which takes longer the smaller their pages are. `parsed`: see tokenizer_ahead."""
        if self.has_tokenizer and self._parsing is None:
            executor = ThreadPoolExecutor(1)
            self._parsing = executor.submit(self._parse_tokenizer, parsed)
            executor.shutdown(wait=False)
        if (memory.available() or 0) > self.pack.mapped.size:
            Thread(target=self._map_weights, daemon=True).start()

    def _map_weights(self) -> None:
        with suppress(FermiError):  # whoever needs a page that cannot be read is told
            memory.warm(self.pack.mapped, self.pack.fileno())

    def _parse_tokenizer(self, parsed: Future[Any] | None = None) -> Tokenizer:
        from fermi_engine.tokenizer import Tokenizer

        return Tokenizer.from_bytes(self.pack.files(), self.config.vocab_size, parsed and parsed.result())

    @cached_property
    def vision(self) -> Vision:
        """The image half. Raises RequestError where the pack holds none."""
        from fermi_engine.vision.encoder import Vision

        on_gpu = self._tower_on_gpu if self.options.is_vision_on_gpu else None
        return Vision(self.pack, self.kernels, self.options.activations, on_gpu)

    def _tower_on_gpu(self) -> GpuVision:
        """The tower on the device that the text model is on, in the same ledger. Raises DeviceError, whose remedy is the text
        model's where that cannot be there: nothing is won by encoding images elsewhere then."""
        from fermi_engine.gpu.vision import GpuVision
        from fermi_engine.vision.encoder import OFFER

        does_without = self.gpu is not None and self.options.prefill == "auto"
        with offering(*OFFER) if does_without else nullcontext():
            owner: Any = self.resident if self.gpu is None else self.gpu.owner()
        evict = owner.spare if self.gpu is None else owner.evict
        with offering(*OFFER):
            tower = GpuVision(owner.device, self.pack, self.pack.vision, owner.ledger, owner.host, self.options.gemm, evict=evict)
        if self.gpu is None:
            owner.make_room = tower.release
        return tower

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError when the pack carries none."""
        return self._parse_tokenizer() if self._parsing is None else self._parsing.result()

    @property
    def has_tokenizer(self) -> bool:
        """Whether text goes in and out; token ids always do."""
        return "tokenizer.json" in self.pack.file_names

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """End-of-turn ids: the union of config, nested text_config, generation_config and tokenizer."""
        ids = set(self.pack.eos_ids)
        if self.has_tokenizer:
            ids |= self.tokenizer.eos_ids()
        return frozenset(ids)

    def session(self) -> Session:
        """A new timeline, empty."""
        from fermi_engine.session import Session

        return Session(self)

    def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams | None = None,
        stop: Sequence[str] = (),
        *,
        images: Sequence[PreparedImage] = (),
        session: Session | None = None,
        reasoning_open: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> Stream:
        """The continuation of `ids` as a Stream: iterate for one Piece a token; `finish` holds the Finish record then.

        session: continue this one (its tokens come before `ids`); else `ids` is the whole history, of which nothing is evaluated
        that a snapshot holds. images: those whose tokens are among `ids` (Vision.expand). reasoning_open: the prompt ends inside
        an open <think>. A model that sees never writes the token that stands for an image. Raises RequestError for prompts and
        settings that cannot be served, before any work.
        """
        from fermi_engine import generate
        from fermi_engine.sampling import SamplingParams
        from fermi_engine.timeline import Pictured, Timeline

        timeline = session or Timeline(self, is_once=True)
        room = self.context - timeline.position
        if len(ids) > room:
            raise RequestError(
                f"{timeline.position + len(ids)} tokens exceed the context of {self.context}; "
                "shorten the prompt or raise --ctx-size"
            )
        driven: Any = timeline
        if images and session is None:
            timeline.images = tuple(images)
        elif images:
            driven = Pictured(timeline, images)
        return generate.stream(
            driven,
            ids,
            self._without_images(params or SamplingParams()),
            eos_ids=self.eos_ids,
            context=room,
            tokenizer=self.tokenizer if self.has_tokenizer else None,
            stop=stop,
            reasoning_open=reasoning_open,
            cancelled=cancelled,
            exp=self.kernels.exp_f32,
            history=timeline.tokens if timeline.position else (),
        )

    def _without_images(self, params: SamplingParams) -> SamplingParams:
        """With the image token banned: where one stands among ids, an image has to come with it."""
        config = self.pack.vision
        if config is None or config.image_token_id >= self.config.vocab_size:
            return params
        token = config.image_token_id
        if params.logit_bias.get(token, 0) > 0:
            raise RequestError(f"logit_bias asks for token id {token}, which stands for an image and is never written; "
                               "leave it out")
        return params.replace(logit_bias={**params.logit_bias, token: float("-inf")})


def _open_pack(path: Path, format: str | None, progress: Callable[[int, int, str], None] | None) -> Pack:
    from fermi_engine.pack import Pack

    if path.is_dir():
        from fermi_engine.convert import cached_pack

        return Pack.open(cached_pack(path, format or "q4_0", progress=progress))
    pack = Pack.open(path)
    if format is not None and pack.default_format != format:
        raise ConfigError(
            f"{path} is a {pack.default_format} pack; format={format!r} was asked for: "
            "convert the checkpoint again with --format, or leave the format out"
        )
    return pack
