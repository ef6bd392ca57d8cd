"""The demo: the small trained model of golden/tiny becomes a Q4_0 pack, every stage is verified, and it answers questions
whose right answers are known: a code found in a long text, a tool call, a sum, and two about pictures, which it draws. Exit
status 1 if an answer is wrong.

No torch. What the model was trained on, and how often it is right: golden/tiny/README.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

from fermi_engine.chat import parse_tool_calls  # noqa: E402
from tools import tiny_image_tasks  # noqa: E402
from tools.tiny_tasks import Encoder, Sample, check, drawn, drawn_row  # noqa: E402

MODEL, DEMO = "golden/tiny", ROOT / "demo"
NEEDLE_TOKENS, SHOWN = 2000, 70
NEEDLE_SEED, TOOL_SEED, SUM_SEED, COUNT_SEED, SECOND_SEED = 3, 1, 2, 1, 7  # any would do: these questions show something


def run(*command: str, stdin: str | None = None) -> str:
    """Show a command and run it, its answer in view and returned; a failure ends the demo with its status."""
    print("\n$ " + " ".join(command), flush=True)
    program = [sys.executable, "-m", "fermi_engine.cli.app", *command[1:]]
    piped = subprocess.PIPE if stdin is not None else None
    done = subprocess.run(program, cwd=ROOT, check=False, input=stdin, stdout=piped, text=True, encoding="utf-8")
    if done.returncode:
        sys.exit(done.returncode)
    print(done.stdout or "", end="", flush=True)
    return done.stdout or ""


def ask(title: str, sample: Sample) -> bool:
    """Put one question to the pack through the command line; whether the answer is right."""
    prompt = question_of(sample)
    print(f"\n{title}: {shortened(prompt)}", flush=True)
    options = ["--think", "--show-reasoning"] if sample.thinking else ["--no-think"]
    for i, view in enumerate(sample.images):
        name = f"demo/{sample.task}{i + 1}.png"
        Image.fromarray(view.pixels()).save(ROOT / name)
        options += ["--image", name]
    if sample.tools:
        tools = DEMO / "tools.json"
        tools.write_text(json.dumps(sample.tools, indent=1), encoding="utf-8")
        print(f"with the tools {', '.join(tool['function']['name'] for tool in sample.tools)}")
        options += ["--tools", "demo/tools.json"]
    text = run("fermi-engine", "generate", "--model", "demo/model.pack", "--prompt", "-", *options, stdin=prompt)
    answer = text.removeprefix("<think>")
    good = check(sample, answer)
    print(f"right answer: {expected(sample)} -> {'correct' if good else 'WRONG'}")
    return good


def question_of(sample: Sample) -> str:
    """The text of the last turn; its images go beside it."""
    content = sample.messages[-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def expected(sample: Sample) -> Any:
    """The right answer in short."""
    if not sample.tools:
        return sample.answer.split("</think>")[-1].strip()
    (call,) = parse_tool_calls(sample.answer, sample.tools)[1]
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def shortened(text: str) -> str:
    """Begin and end of a long text."""
    return text if len(text) <= 3 * SHOWN else f"{text[:SHOWN]} [... {len(text)} characters ...] {text[-SHOWN:]}"


def main() -> int:
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    run("fermi-engine", "convert", MODEL, "demo/model.pack", "--format", "q4_0")
    run("fermi-engine", "info", "demo/model.pack", "--check")
    run("fermi-engine", "verify")
    encoder = Encoder.from_directory(ROOT / MODEL)
    measure = encoder.measure
    needle = drawn_row("held", NEEDLE_SEED, 0, measure, NEEDLE_TOKENS)[4]
    questions = {
        f"A code half-way down a text of {len(encoder.prompt(needle))} tokens": needle,
        "A tool call": drawn("tool_call", "held", TOOL_SEED, 0, measure, 400),
        "Arithmetic": drawn("arithmetic", "held", SUM_SEED, 0, measure, 64),
        "A picture": tiny_image_tasks.drawn("count", "held", COUNT_SEED, 0),
        "Two pictures": tiny_image_tasks.drawn(tiny_image_tasks.TWO, "held", SECOND_SEED, 0),
    }
    good = [ask(title, sample) for title, sample in questions.items()]
    print(f"\n{sum(good)} of {len(good)} answers are right")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
