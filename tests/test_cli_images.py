"""`fermi-engine generate --image`: files to answers on generated checkpoints of both families, and what is refused."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fermi_engine import Engine, EngineConfig, SamplingParams, chat
from fermi_engine.convert import convert
from fermi_engine.session import Session
from tests.test_cli import assert_one_line_error, run
from tools.make_checkpoint import make_checkpoint

FAMILIES = {"qwen": {"experts": 4, "experts_per_tok": 2}, "minicpm": {"family": "minicpm", "tied": True}}
GREEDY = ["--temp", "0", "-n", "6", "--ignore-eos", "--no-think"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs `qwen`, `minicpm` and `text`; images a.png, b.jpg, and a's twin c.png that differs in one pixel."""
    root = tmp_path_factory.mktemp("files")
    for name, options in FAMILIES.items():
        convert(make_checkpoint(root / f"{name}.d", 3, layers=4, **options), root / name, "q8_0")
    convert(make_checkpoint(root / "text.d", 3, layers=4, text_only=True), root / "text", "q8_0")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 40, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(root / "a.png")
    Image.fromarray(pixels[:, ::-1]).save(root / "b.jpg")
    pixels[30, 20] ^= 255
    Image.fromarray(pixels).save(root / "c.png")
    (root / "notes.txt").write_text("no image\n")
    return root


def expected(pack: Path, names: list[str], text: str, raw: bool = False) -> str:
    """The same by the library."""
    if not raw:
        content = [{"type": "image"}] * len(names) + [{"type": "text", "text": text}]
        return answered(pack, names, [{"role": "user", "content": content}])
    engine = Engine.load(pack)
    return continued(engine, names, engine.tokenizer.encode(engine.vision.marker * len(names) + text))


def answered(pack: Path, names: list[str], messages: list[dict], **settings) -> str:
    engine = Engine.load(pack, config=EngineConfig(**settings))
    template = chat.find_template(engine.pack.files())
    return continued(engine, names, chat.encode(engine.tokenizer, template, messages, enable_thinking=False))


def continued(engine: Engine, names: list[str], ids: list[int]) -> str:
    images = [engine.vision.prepare(Path(engine.pack.path).parent / name) for name in names]
    ids = engine.vision.expand(engine.tokenizer, ids, images)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return "".join(piece.text for piece in engine.generate(ids, params, images=images))


@pytest.mark.parametrize("family", FAMILIES)
def test_images_in_a_prompt(family: str, files: Path, capsys: pytest.CaptureFixture) -> None:
    pack, names = files / family, ["a.png", "b.jpg"]
    options = [part for name in names for part in ("--image", files / name)]
    status, out, err = run(capsys, "generate", "--model", pack, *options, "--prompt", "What is it?", *GREEDY, "--timing")
    assert status == 0, err
    assert out.rstrip("\n") == expected(pack, names, "What is it?").rstrip("\n")
    assert "images encoded: 2 in " in err
    plain = [part for part in GREEDY if part != "--no-think"]
    status, out, err = run(capsys, "generate", "--model", pack, "--image", files / "a.png", "--prompt", "It is", "--raw", *plain)
    assert status == 0, err
    assert out.rstrip("\n") == expected(pack, ["a.png"], "It is", raw=True).rstrip("\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_another_pixel_or_order_gives_other_logits(family: str, files: Path) -> None:
    engine = Engine.load(files / family)
    seen = []
    for names in (["a.png", "b.jpg"], ["b.jpg", "a.png"], ["c.png", "b.jpg"]):
        images = [engine.vision.prepare(files / name) for name in names]
        ids = engine.vision.expand(engine.tokenizer, engine.tokenizer.encode(engine.vision.marker * 2 + "?"), images)
        seen.append(engine.session().prompt(ids, images=images).tobytes())
    assert len(set(seen)) == 3


def test_a_talk_keeps_its_images_until_it_is_reset(files: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    given, real = [], Session.prompt

    def spy(self, ids, progress, marks, images):
        given.append((len(ids), [image.digest for image in images]))
        return real(self, ids, progress, marks, images)

    monkeypatch.setattr(Session, "prompt", spy)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/reset\nthree\n"))
    status, _, err = run(capsys, "generate", "--model", files / "qwen", "--image", files / "a.png", "--chat", *GREEDY)
    assert status == 0, err
    assert [digests for _, digests in given] == [given[0][1]] * 3
    assert len(given[0][1]) == 1
    assert given[1][0] > given[0][0] > given[2][0] - 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_talk_about_images_goes_on_in_another_run(family: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture,
                                                   monkeypatch) -> None:
    """By name, and with another image later: the answers of one run, and next to nothing evaluated anew."""
    def say(*args, where: str = "a", status: int = 0) -> tuple[str, str]:
        found, out, err = run(capsys, "generate", "--model", files / family, "--snapshot-dir", tmp_path / where, *GREEDY, *args)
        assert found == status, err
        return out, err

    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    whole = say("--chat", "--image", files / "a.png", where="b")[0]
    shown = shutil.copy(files / "a.png", tmp_path / "shown.png")
    first = say("--prompt", "one", "--image", shown, "--session", "s")[0]
    second, err = say("--prompt", "two", "--session", "s", "--timing")
    assert first + second == whole
    assert "images encoded" not in err
    shutil.rmtree(tmp_path / "b")
    third = say("--prompt", "three", "--image", files / "b.jpg", "--session", "s")[0]
    image = {"type": "image"}
    users = [[image, {"type": "text", "text": "one"}], "two", [image, {"type": "text", "text": "three"}]]
    turns = [{"role": "user", "content": content} for content in users]
    for at, text in ((1, first), (3, second)):
        turns.insert(at, {"role": "assistant", "content": text.removesuffix("\n")})
    assert third.rstrip("\n") == answered(files / family, ["a.png", "b.jpg"], turns).rstrip("\n")
    for state in tmp_path.joinpath("a").glob("*.safetensors"):
        state.unlink()
    fourth, err = say("--prompt", "four", "--session", "s", "--kv-format", "f16", "--timing")
    assert "images encoded: 2 " in err
    later = [{"role": "assistant", "content": third.removesuffix("\n")}, {"role": "user", "content": "four"}]
    assert fourth.rstrip("\n") == answered(files / family, ["a.png", "b.jpg"], [*turns, *later], kv_format="f16").rstrip("\n")
    Image.new("RGB", (40, 60)).save(shown)
    err = say("--prompt", "five", "--session", "s", status=2)[1]
    assert_one_line_error(2, "", err.splitlines(keepends=True)[-1], "session 's' shows", "shown.png", "has changed since")
    Path(shown).unlink()
    err = say("--prompt", "five", "--session", "s", status=2)[1]
    assert_one_line_error(2, "", err.splitlines(keepends=True)[-1], "cannot read", "shown.png")


def test_raw_text_after_images_goes_on_in_another_run(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plain = ["generate", "--model", files / "qwen", "--temp", "0", "--ignore-eos", "--image", files / "a.png",
             "--prompt", "It is", "--raw"]
    whole = run(capsys, *plain, "-n", "8")[1]
    kept = ["--snapshot-dir", tmp_path, "--session", "s"]
    first = run(capsys, *plain, "-n", "3", *kept)[1]
    status, second, err = run(capsys, *plain[:6], "-n", "5", *kept, "--timing")
    assert status == 0, err
    assert first.rstrip("\n") + second.rstrip("\n") == whole.rstrip("\n")
    assert "images encoded" not in err


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_an_answer_holds_no_image_token(family: str, temperature: str, files: Path, tmp_path: Path,
                                        capsys: pytest.CaptureFixture) -> None:
    """However little the others are worth: with one among the ids, the session would ask for an image that nobody gave."""
    engine = Engine.load(files / family)
    token = engine.vision.config.image_token_id
    bias = [part for i in range(engine.config.vocab_size) if i != token for part in ("--logit-bias", f"{i}=-1000")]
    plain = ["generate", "--model", files / family, "--temp", temperature, "-n", "4", "--ignore-eos", "--snapshot-dir", tmp_path,
             "--session", "s", *bias]
    for args in (["--prompt", "It is", "--no-think", "--image", files / "a.png"], [], ["--prompt", "And"]):
        status, _, err = run(capsys, *plain, *args)
        assert status == 0, err


def test_mistakes_are_one_line(files: Path, capsys: pytest.CaptureFixture) -> None:
    qwen = ["generate", "--model", files / "qwen", *GREEDY]
    token = Engine.load(files / "qwen").vision.config.image_token_id
    cases = [
        ([*qwen, "--prompt", "a", "--image", files / "none.png"], ("cannot read", "none.png")),
        ([*qwen, "--prompt", "a", "--image", files / "notes.txt"], ("notes.txt is no image", "PNG")),
        ([*qwen[:-1], "--ids", "1,2", "--image", files / "a.png"], ("--image", "--ids")),
        ([*qwen, "--session", "s", "--image", files / "a.png"], ("--image", "found none")),
        ([*qwen, "--prompt", "a", "--logit-bias", f"{token}=5"], (f"token id {token}", "stands for an image", "leave it out")),
        (["generate", "--model", files / "text", "--prompt", "a", "--image", files / "a.png"], ("holds no vision tower",)),
    ]
    for args, parts in cases:
        status, out, err = run(capsys, *args)
        assert_one_line_error(status, out, err.splitlines(keepends=True)[-1], *parts)


def test_a_template_without_images_is_refused(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = Path(shutil.copytree(files / "qwen.d", tmp_path / "c"))
    template = source / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|vision_start|><|image_pad|><|vision_end|>", ""))
    pack = convert(source, tmp_path / "p", "q8_0")
    status, out, err = run(capsys, "generate", "--model", pack, "--prompt", "a", "--image", files / "a.png", *GREEDY)
    assert_one_line_error(status, out, err.splitlines(keepends=True)[-1], "0 places for images", "1 images")
