"""Train the small model whose right answers are known: `python tools/train_tiny.py --out DIR`, then `--resume DIR` goes on.

The schedule runs over `--tokens`; with `--total-minutes` it runs faster where the machine is too slow for that, so that
it always ends. `--minutes` ends one command early and leaves a state in --out (saved every minute as well) and the
curves in --out/curve.tsv. `--resume DIR --export CHECKPOINT` alone writes the released layout, `--mean A B --export CHECKPOINT`
the weights between those of two checkpoints. Runs on a CPU too,
slower, and needs neither a network nor the engine's compiled kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine.config import ModelConfig
from fermi_engine.vision.config import VisionConfig
from tools import tiny_batches as batches
from tools import tiny_files as files
from tools import tiny_model, tiny_tokenizer, tiny_tower
from tools.tiny_batches import READ, SAID, Batch, Order
from tools.tiny_optimiser import Optimiser
from tools.tiny_quantise import Master
from tools.tiny_tower import Pictures

START = time.perf_counter() - time.process_time()  # of the program, about: the imports count
READ_WEIGHT, BALANCE_WEIGHT, CLIP = 0.1, 0.01, 1.0
WARMUP, DECAY_FROM, LAST_RATE = 0.02, 0.5, 0.02  # shares of the schedule, and of the learning rate
ROUNDED_FROM, PLAIN_EVERY = 0.65, 4  # from this progress on q4_0 weights are seen, but for one step in four
SAVE_SECONDS, EVALUATE_SECONDS = 60, 75
LONG = 4096  # rows of more tokens come in batches of twice the size: they hold few answers


@dataclasses.dataclass
class Settings:
    """What a run is: kept in its state, so that a resumed run goes on with the same."""

    seed: int = 0
    tokens: int = 200_000_000
    step_tokens: int = 32768
    rate: float = 2e-3
    total_minutes: float | None = None
    stage: str = "text"  # of batches.PHASES; "text" leaves the vision tower as it is drawn
    start: str | None = None  # the checkpoint it goes on from
    model: dict[str, Any] = dataclasses.field(default_factory=dict)


class Trainer:
    """Weights, optimiser and counters of a run; `step`, `tokens` and `seconds` count from its first command on."""

    def __init__(self, settings: Settings, texts: dict[str, bytes], device: str) -> None:
        self.settings, self.texts, self.device = settings, texts, device
        self.raw_config = files.config_json(**settings.model)
        self.config = ModelConfig.from_hf(self.raw_config)
        self.vision = VisionConfig.from_hf(self.raw_config, self.config.hidden_size, files.PREPROCESSOR)
        self.master = Master.of(self._initial(), device)
        self.optimiser = Optimiser(self.master)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.step, self.tokens, self.seconds_before = 0, 0, 0.0

    def _initial(self) -> tiny_model.Params:
        """The checkpoint that the settings name, or fresh weights; the tower among them where images are trained."""
        fresh = tiny_model.initial(self.config, self.settings.seed) | (self._fresh_tower() if self.sees_images else {})
        if self.settings.start is None:
            return fresh
        return files.weights(Path(self.settings.start), {name: tuple(w.shape) for name, w in fresh.items()})

    def _fresh_tower(self) -> tiny_model.Params:
        return tiny_tower.initial(self.vision, self.settings.seed)

    @property
    def sees_images(self) -> bool:
        """Whether the tower is trained."""
        return self.settings.stage != "text"

    @property
    def seconds(self) -> float:
        """Time spent, earlier commands included."""
        return self.seconds_before + time.perf_counter() - START

    @property
    def progress(self) -> float:
        """0..1 along the schedule: by tokens, or by time where that is further."""
        limit = self.settings.total_minutes
        return min(1.0, max(self.tokens / self.settings.tokens, self.seconds / (60 * limit) if limit else 0.0))

    def order(self, index: int) -> Order:
        """What step `index` is to train on, asked for now."""
        length = batches.length_at(self.progress, index, self.settings.seed, batches.PHASES[self.settings.stage])
        return Order(index, self.settings.seed, length, self.rows(length))

    def rows(self, length: int) -> int:
        """Rows of a batch."""
        return max(1, self.settings.step_tokens * (2 if length > LONG else 1) // length)

    def rate(self) -> float:
        """Learning rate: up, level, and down in a straight line to nearly nothing."""
        p = self.progress
        down = LAST_RATE + (1 - LAST_RATE) * min(1.0, (1 - p) / (1 - DECAY_FROM))
        return self.settings.rate * min(1.0, (p + 1e-3) / WARMUP, down)

    def train_step(self, batch: Batch) -> Tensor:
        """One update; -> losses of said and read tokens, imbalance of the experts, gradient norm, on the device."""
        batch = sent(batch, self.device)
        rounded = self.progress >= ROUNDED_FROM
        seen = self.master.seen(self.dtype, rounded, rounded and self.step % PLAIN_EVERY != 0)
        model = tiny_model.Model(self.config, seen, self.dtype, self.vision)
        said, read = losses(model, batch)
        balance = torch.stack(model.balance).mean()
        (said + READ_WEIGHT * read + BALANCE_WEIGHT * balance).backward()
        gradient = self.master.gradient(seen)
        norm = gradient.norm()
        scale = torch.where(norm.isfinite(), (CLIP / (norm + 1e-6)).clamp(max=1.0), 0.0)
        self.optimiser.step(torch.nan_to_num(gradient, 0.0, 0.0, 0.0) * scale, self.rate())
        self.step += 1
        self.tokens += batch.ids.numel()
        return torch.stack([said, read, balance, norm]).detach()

    @torch.no_grad()
    def evaluate(self, held: dict[str, list[Batch]], q4_0: bool) -> dict[str, np.ndarray]:
        """Which held-out samples come out right to the last token, by name, with bfloat16 or q4_0 weights.

        The likeliest token must be the right one at every place of the answer: what greedy generation gives.
        """
        seen = self.master.seen(torch.float32, storage=True, q4_0=q4_0)
        model = tiny_model.Model(self.config, seen, torch.float32, self.vision)
        return {name: np.concatenate([exact(model, sent(part, self.device)) for part in parts]) for name, parts in held.items()}

    def save(self, path: Path) -> None:
        """Leave a state to resume from."""
        kept = {"flat": self.master.flat, "first": self.optimiser.first.to(torch.bfloat16),
                "second": self.optimiser.second.to(torch.bfloat16)}
        files.save_state(path, kept, {
            "step": self.step, "tokens": self.tokens, "seconds": self.seconds, "updates": self.optimiser.steps,
            "settings": dataclasses.asdict(self.settings),
            "texts": {name: data.decode() for name, data in self.texts.items()}})

    @classmethod
    def resumed(cls, path: Path, device: str, **changes: Any) -> Trainer:
        """The run that left a state at `path`; `changes` replace settings. Raises StateError."""
        tensors, facts = files.load_state(path)
        settings = Settings(**{**facts["settings"], **changes, "start": None})  # its weights are in the state
        trainer = cls(settings, {name: text.encode() for name, text in facts["texts"].items()}, device)
        if tensors["flat"].shape != trainer.master.flat.shape:
            raise files.StateError(f"{path} holds {len(tensors['flat'])} weights of stage {facts['settings']['stage']}, but "
                                   f"stage {settings.stage} trains {len(trainer.master.flat)}; write them with --export, then "
                                   "give --start instead of --resume")
        trainer.master.flat.copy_(tensors["flat"])
        trainer.optimiser.first.copy_(tensors["first"])
        trainer.optimiser.second.copy_(tensors["second"])
        trainer.optimiser.steps = facts["updates"]
        trainer.step, trainer.tokens, trainer.seconds_before = facts["step"], facts["tokens"], facts["seconds"]
        return trainer

    def export(self, path: Path) -> None:
        """Write the released layout."""
        files.export(path, self.raw_config, self._fresh_tower() | self.master.views(), self.texts)


def sent(batch: Batch, device: str) -> Batch:
    """A batch as tensors on the device, without waiting for what that is doing."""
    images = batch.images
    if images is not None:
        images = Pictures(*(_sent(x, device) if isinstance(x, np.ndarray) else x for x in images))
    return Batch(_sent(batch.ids, device).long(), _sent(batch.kinds, device), images)


def _sent(x: np.ndarray, device: str) -> Tensor:
    tensor = torch.from_numpy(x)
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor


def losses(model: tiny_model.Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the said and of the read tokens."""
    logits = model.head(model.hidden(batch.ids, batch.images)).flatten(0, 1)
    target, kind = (F.pad(x[:, 1:], (0, 1)).flatten() for x in (batch.ids, batch.kinds))
    entropy = F.cross_entropy(logits.float(), target, reduction="none")
    said, read = ((entropy * (kind == which)).sum() / (kind == which).sum().clamp(min=1) for which in (SAID, READ))
    return said, read


def exact(model: tiny_model.Model, batch: Batch) -> np.ndarray:
    """-> bool [B]: the likeliest token is the right one at every SAID place."""
    said = batch.kinds == SAID
    hidden = model.hidden(batch.ids, batch.images)[:, :-1]
    row, place = said[:, 1:].nonzero(as_tuple=True)
    wrong = model.head(hidden[row, place]).argmax(-1) != batch.ids[:, 1:][row, place]
    return (torch.zeros(len(said), device=said.device).index_add_(0, row, wrong.float()) == 0).cpu().numpy()


class Curve:
    """curve.tsv: one value a line, appended as it comes."""

    HEADER = "step\ttokens\tseconds\tprogress\tseries\tvalue\n"

    def __init__(self, path: Path, earlier: Path | None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        old = earlier / path.name if earlier else path
        path.write_text(old.read_text() if earlier and old.is_file() else self.HEADER)

    def add(self, trainer: Trainer, series: str, value: float) -> None:
        """Append one value."""
        with self.path.open("a") as out:
            out.write(f"{trainer.step}\t{trainer.tokens}\t{trainer.seconds:.1f}\t{trainer.progress:.4f}\t{series}\t"
                      f"{value:.5g}\n")


class Log:
    """Losses by row length, averaged on the device and read every `every` steps."""

    NAMES = ("said", "read", "balance", "norm")

    def __init__(self, curve: Curve, every: int) -> None:
        self.curve, self.every = curve, every
        self._sums: dict[int, list[Tensor]] = {}
        self._since = (time.perf_counter(), 0)

    def note(self, trainer: Trainer, length: int, values: Tensor) -> None:
        """Remember one step's values; now and then print and store their means."""
        self._sums.setdefault(length, []).append(values)
        if trainer.step % self.every:
            return
        parts = []
        for length, rows in sorted(self._sums.items()):
            means = torch.stack(rows).mean(0).tolist()
            for name, value in zip(self.NAMES, means, strict=True):
                self.curve.add(trainer, f"{name}/{length}", value)
            parts.append(f"{length}: {means[0]:.4f}")
        now, before = time.perf_counter(), self._since
        speed = (trainer.tokens - before[1]) / (now - before[0]) if before[1] else 0.0
        print(f"step {trainer.step} progress {trainer.progress:.3f} {trainer.tokens / 1e6:.1f}M tokens {speed:,.0f}/s "
              f"rate {trainer.rate():.1e} norm {means[3]:.2f} balance {means[2]:.2f} | said {' '.join(parts)}", flush=True)
        self._sums, self._since = {}, (now, trainer.tokens)


def report(trainer: Trainer, curve: Curve, held: dict[str, list[Batch]], by_depth: bool = False) -> float:
    """Evaluate twice, print and store; -> seconds it took."""
    begin = time.perf_counter()
    for kind, q4_0 in (("bf16", False), ("q4_0", True)):
        right = trainer.evaluate(held, q4_0)
        for name, row in right.items():
            curve.add(trainer, f"accuracy/{name}/{kind}", row.mean())
        print(f"  held-out {kind}: " + "  ".join(f"{name} {row.mean():.3f}" for name, row in right.items()), flush=True)
        for name, row in right.items():
            if by_depth and name.startswith("needle"):
                shares = row.reshape(-1, 9).mean(0)
                print(f"  {name} by depth: " + " ".join(f"{share:.2f}" for share in shares), flush=True)
    return time.perf_counter() - begin


def train(trainer: Trainer, source: batches.Source, out: Path, minutes: float | None, earlier: Path | None = None,
          steps: int | None = None, held_scale: float = 1.0, log_every: int = 25) -> None:
    """Train until the schedule, `minutes` (since the program began) or `steps` end; then evaluate and save."""
    curve = Curve(out / "curve.tsv", earlier)
    log = Log(curve, log_every)
    coming = source.held(held_scale, trainer.sees_images)
    last_step = None if steps is None else trainer.step + steps
    saved = evaluated = time.perf_counter()
    took, held = 15.0, None
    while trainer.progress < 1 and trainer.step != last_step:
        now = time.perf_counter()
        if minutes is not None and now - START > 60 * minutes - 2 * took - 10:
            break
        order, batch = source.next(trainer.order, trainer.step)
        log.note(trainer, order.length, trainer.train_step(batch))
        if now - saved > SAVE_SECONDS:
            trainer.save(out)
            saved = time.perf_counter()
        if now - evaluated > EVALUATE_SECONDS and coming.ready():
            held = held or coming.get()
            took = report(trainer, curve, held)
            evaluated = time.perf_counter()
    trainer.save(out)
    report(trainer, curve, held or coming.get(), by_depth=True)
    print(f"stopped at progress {trainer.progress:.3f}, step {trainer.step}, {trainer.tokens / 1e6:.1f}M tokens, "
          f"{trainer.seconds:.0f} s in all", flush=True)


def benchmark(trainer: Trainer, source: batches.Source, seconds: float = 4.0) -> None:
    """Print tokens/s of training by row length, with and without q4_0, peak memory, and the speed of the workers."""
    encoder = tiny_tokenizer.encoder(trainer.texts)
    for length in batches.PHASES[trainer.settings.stage][-1][1]:
        batch = batches.make_batch(encoder, Order(0, 0, length, trainer.rows(length)))
        for rounded in (False, True):
            trainer.tokens = trainer.settings.tokens if rounded else 0
            _timed(trainer, batch, seconds / 2, f"q4_0 {rounded!s:5}")
    begin, tokens, index = time.perf_counter(), 0, 0
    trainer.tokens = trainer.settings.tokens // 2
    while time.perf_counter() - begin < 2 * seconds:
        order, _ = source.next(trainer.order, index)
        tokens, index = tokens + order.rows * order.length, index + 1
    print(f"workers deliver {tokens / (time.perf_counter() - begin):,.0f} tokens/s", flush=True)


def _timed(trainer: Trainer, batch: Batch, seconds: float, label: str) -> None:
    cuda = trainer.device == "cuda"
    tokens = trainer.tokens
    for _ in range(2):
        trainer.train_step(batch)[0].item()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - begin < seconds:
        trainer.train_step(batch)[0].item()
        count += 1
    each = (time.perf_counter() - begin) / count
    trainer.tokens = tokens
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
    print(f"{label} {batch.ids.shape[0]:4d} x {batch.ids.shape[1]:5d}: {batch.ids.size / each:10,.0f} tokens/s, "
          f"{1000 * each:.0f} ms a step{memory}", flush=True)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="directory for the state and the curves")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from the state in DIR")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the checkpoint in the released layout")
    parser.add_argument("--mean", type=Path, nargs=2, metavar="DIR", help="export the mean of two checkpoints; trains nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, help="end this command after so many minutes")
    parser.add_argument("--total-minutes", type=float, help="end the schedule after so many minutes of all commands")
    parser.add_argument("--tokens", type=int, help="tokens of the whole schedule")
    parser.add_argument("--step-tokens", type=int, help="tokens a step, about")
    parser.add_argument("--rate", type=float, help="highest learning rate")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stage", choices=list(batches.PHASES), help="what to train on (text)")
    parser.add_argument("--start", metavar="DIR", help="begin with the weights of a checkpoint that --export wrote")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)),
                        help="processes that draw batches")
    parser.add_argument("--held-scale", type=float, default=1.0, help="size of the held-out set while training")
    parser.add_argument("--benchmark", action="store_true", help="print speeds first; alone: nothing else")
    return parser.parse_args(argv)


def _mistake(args: argparse.Namespace) -> str | None:
    """What is wrong with the options together."""
    if args.mean and not args.export:
        return "--mean trains nothing; give --export, the folder of the checkpoint that it writes"
    if args.resume and args.start:
        return "--resume goes on with the weights of its state and --start with those of a checkpoint; give one of them"
    if not (args.out or args.benchmark or ((args.resume or args.mean) and args.export)):
        return "give --out to train, --benchmark, or --resume or --mean with --export"
    return None


def main(argv: list[str] | None = None) -> int:
    """Command line; 2 for a mistake, told in one line."""
    args = _arguments(argv)
    names = ("seed", "tokens", "step_tokens", "rate", "total_minutes", "stage", "start")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if mistake := _mistake(args):
        print(f"train_tiny: {mistake}", file=sys.stderr)
        return 2
    source = None
    try:
        if args.mean:
            files.mean(*args.mean, args.export)
            return 0
        texts = tiny_tokenizer.tokenizer_files()
        if args.resume:
            texts = {name: text.encode() for name, text in files.load_state(args.resume)[1]["texts"].items()}
        if args.out or args.benchmark:  # before CUDA starts: workers are forked
            source = batches.Source(texts, args.workers)
        if args.benchmark:
            benchmark(Trainer(Settings(**changes), texts, args.device), source)
            source.forget()
        trainer = (Trainer.resumed(args.resume, args.device, **changes) if args.resume
                   else Trainer(Settings(**changes), texts, args.device))
        if args.out:
            machine = torch.cuda.get_device_name() if trainer.device == "cuda" else "CPU"
            print(f"{trainer.config.num_hidden_layers} layers, {len(trainer.master.flat) / 1e6:.2f}M weights, {machine}, "
                  f"torch {torch.__version__}, {args.workers} workers, {trainer.settings}, progress {trainer.progress:.3f}",
                  flush=True)
            train(trainer, source, args.out, args.minutes, args.resume, held_scale=args.held_scale)
        if args.export:
            trainer.export(args.export)
            print(f"wrote {args.export}")
    except files.StateError as err:
        print(f"train_tiny: {err}", file=sys.stderr)
        return 2
    finally:
        if source:
            source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
