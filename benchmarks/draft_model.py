"""What a draft model for a demo model is made of, and how often its drafts are right.

    D=build/draft; mkdir -p $D
    python benchmarks/draft_model.py prompts > $D/prompts.jsonl       # what the documentation's texts begin with
    laddertron run configs/demo-standard.yaml -i $D/prompts.jsonl -o $D/answers.jsonl --set engine.max_num_seqs=64
    python benchmarks/draft_model.py text $D/answers.jsonl > $D/text.jsonl
    laddertron train -o $D/model --teacher configs/demo-standard --text $D/text.jsonl --wiring standard \\
        --layers 2 --hidden 64 --ffn 128 --batch 16 --tokens 16000000 --learning-rate 1e-2
    python benchmarks/draft_model.py acceptance configs/demo-standard.yaml $D/model

The last one answers the beginnings of held-out texts, greedily and at temperature 1 with top_p, with and without
drafts: a JSON line each, among them whether all answers are the same. No clock is read: it may run beside anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from laddertron.launchers.cli.__main__ import group
from laddertron.models.training.corpus import BOS, END, EOS, python_documentation

DRAWS = [(0.0, 0), (0.8, 1)]
"""Temperatures and seeds."""


def beginnings(held_out: bool) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Of the renderings on one side of the split: up to the answer, as the API wants it, and what ends the answer."""
    for document in python_documentation():
        for text in document.renderings if document.held_out is held_out else ():
            if "<|assistant|>" in text:
                question = text.partition("<|user|>")[2].partition(END)[0]
                begins = text.partition("<|assistant|>")
                yield begins[0] + begins[1], {"messages": [{"role": "user", "content": question}]}, END
            else:
                title = text.removeprefix(BOS).partition("\n")[0]
                yield f"{BOS}{title}\n", {"prompt": f"{title}\n"}, EOS


def requests(held_out: bool, draws: Iterable[tuple[float, int]], **params: Any) -> Iterator[dict[str, Any]]:
    for number, (_, body, _) in enumerate(beginnings(held_out)):
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        for temperature, seed in draws:
            asked = {"model": "demo", "max_tokens": 64, "temperature": temperature, "seed": seed, **params, **body}
            yield {"custom_id": f"{number}/{seed}", "method": "POST", "url": url, "body": asked}


def answers(path: Path) -> dict[str, tuple[str, str]]:
    """By custom_id: what was said, and why it ended."""
    found = {}
    for line in path.read_text().splitlines():
        data = json.loads(line)
        choice = data["response"]["body"]["choices"][0]
        said = choice["message"]["content"] if "message" in choice else choice["text"]
        found[data["custom_id"]] = said, choice["finish_reason"]
    return found


def text(answered: Path) -> Iterator[str]:
    """Documents made of beginnings and answers."""
    begins = list(beginnings(False))
    for name, (said, why) in answers(answered).items():
        before, _, end = begins[int(name.partition("/")[0])]
        yield before + said + (end if why == "stop" else "")


def acceptance(config: str, draft: str, limit: int) -> Iterator[dict[str, Any]]:
    """Runs the held-out beginnings through the deployment; rank 0's counters are in the run's end table."""
    with tempfile.TemporaryDirectory() as folder:
        for name, temperature, params in (("greedy", 0.0, {}), ("temperature 1, top_p 0.9", 1.0, {"top_p": 0.9})):
            asked, plain = Path(folder, "asked.jsonl"), dict[str, tuple[str, str]]()
            lines = list(requests(True, [(temperature, 0)], **params))[:limit]
            asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
            for kind in ("false", "ngram", "model"):
                out = Path(folder, f"{temperature}-{kind}.jsonl")
                args = ["run", config, "-i", str(asked), "-o", str(out), "--set", f"engine.speculation={kind}"]
                args += ["--set", "parallel.deterministic=true", "--set", "parallel.emulated_delay=0"]
                args += ["--set", f"engine.draft_model={Path(draft).absolute()}"] if kind == "model" else []
                result = CliRunner().invoke(group, args)
                if result.exit_code:
                    raise SystemExit(f"laddertron {' '.join(args)}: {result.output}")
                said = answers(out)
                plain = plain or said
                table = [line.strip() for line in result.stderr.splitlines() if line.startswith(("tokens", "drafts"))]
                yield {"draws": name, "speculation": kind, "lines": len(said), "same": said == plain, "table": table}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("prompts")
    made = parts.add_parser("text")
    made.add_argument("answers", type=Path)
    asked = parts.add_parser("acceptance")
    asked.add_argument("config")
    asked.add_argument("draft")
    asked.add_argument("--limit", type=int, default=200, help="beginnings")
    args = parser.parse_args()
    if args.part == "prompts":
        found: Iterable[dict[str, Any]] = requests(False, DRAWS)
    elif args.part == "text":
        found = ({"text": each} for each in text(args.answers))
    else:
        found = acceptance(args.config, args.draft, args.limit)
    for line in found:
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
