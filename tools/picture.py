"""Draw the README's picture: a real completion, each token coloured by its probability.

python tools/picture.py --out docs/colorize.svg
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from starquill.cli.printing import confidence_style
from starquill.engine.engine import Engine
from starquill.loading import load
from starquill.types import SamplingParams

PROMPT = '''import json
from pathlib import Path


def read_settings(path):
    """Return the settings that a JSON file holds."""
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--temp", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/colorize.svg"))
    options = parser.parse_args()
    params = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temp, seed=options.seed, logprobs=0
    )
    text = Text(options.prompt, style="dim")
    for delta in Engine(load(options.model)).generate(options.prompt, params):
        text.append(delta.text, confidence_style(delta))
    console = Console(record=True, width=72, file=io.StringIO())
    console.print(text)
    svg = console.export_svg(title="starquill generate --colorize", theme=MONOKAI)
    options.out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
