"""What a draft model for a demo model is made of, and how often its drafts are right.

    D=build/draft; mkdir -p $D
    python tools/benchmarks/draft_model.py prompts > $D/prompts.jsonl       # what the documentation's texts begin with
    laddertron run configs/demo-standard.yaml -i $D/prompts.jsonl -o $D/answers.jsonl --set engine.max_num_seqs=64
    python tools/benchmarks/draft_model.py text $D/answers.jsonl > $D/text.jsonl
    laddertron train -o $D/model --teacher configs/demo-standard --text $D/text.jsonl --wiring standard \\
        --layers 2 --hidden 64 --ffn 128 --batch 8 --tokens 2400000 --learning-rate 1e-2 --dtype bfloat16
    python tools/benchmarks/draft_model.py acceptance configs/demo-standard.yaml $D/model
    python tools/benchmarks/draft_model.py speed configs/demo-standard.yaml $D/model  # on a quiet machine; ten minutes

The last two answer the beginnings of held-out texts and say a JSON line a case: `acceptance` (greedy, and temperature 1
with top_p) whether answers are those without drafts, and the share of drafts that was right; it reads no clock. `speed`
has tokens a second, 64 tokens for each beginning.
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
from common import say, to_and_fro
from laddertron.launchers.cli.__main__ import group
from laddertron.tools.bench.bench import spread
from laddertron.tools.train.corpus import BOS, END, EOS, python_documentation

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


def run(config: str, asked: Path, speculation: str, draft: str, *sets: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What `laddertron run` answered, and the rows of its end table."""
    out = asked.with_name("answers.jsonl")
    out.unlink(missing_ok=True)
    keys = [*sets, f"engine.speculation={speculation}"]
    keys += [f"engine.draft_model={Path(draft).absolute()}"] if speculation in ("model", "auto") else []
    args = ["run", config, "-i", str(asked), "-o", str(out), *(word for key in keys for word in ("--set", key))]
    result = CliRunner().invoke(group, args, standalone_mode=False)
    if result.exception or result.return_value:
        raise SystemExit(f"laddertron {' '.join(args)}: {result.output}")
    rows = [line.split(None, 1) for line in result.stderr.splitlines()]
    return answers(out), {row[0]: row[1].strip() for row in rows if len(row) == 2}


def acceptance(config: str, draft: str, limit: int, folder: Path) -> Iterator[dict[str, Any]]:
    """With deterministic sums and no delay: answers with and without drafts, and the share of drafts that was right."""
    asked, kinds = folder / "asked.jsonl", ("false", "ngram", "model")
    for name, temperature, params in (("greedy", 0.0, {}), ("temperature 1, top_p 0.9", 1.0, {"top_p": 0.9})):
        lines = list(requests(True, [(temperature, 0)], **params))
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines[:: max(1, len(lines) // limit)]))
        plain = dict[str, Any]()
        for kind in kinds:
            said, table = run(config, asked, kind, draft, "parallel.deterministic=true", "parallel.emulated_delay=0")
            plain = plain or said
            yield {"draws": name, "speculation": kind, "same": said == plain, "drafts": table.get("drafts")}


def speed(config: str, draft: str, limit: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Over the deployment's own link, batch 1 and 8, tokens/s of three runs each in turns: median, least, most."""
    asked, kinds = folder / "asked.jsonl", ("false", "ngram", "model", "auto")
    lines = list(requests(True, [(0.0, 0)], ignore_eos=True))
    for batch in (1, 8):
        count = limit // 8 * batch
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines[:: max(1, len(lines) // count)][:count]))
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(3):
            for kind in to_and_fro(kinds, turn):
                _, table = run(config, asked, kind, draft, f"engine.max_num_seqs={batch}")
                found[kind].append(float(table["speed"].split()[0].replace(",", "")))
        yield {"config": Path(config).stem, "batch": batch, **{kind: spread(each) for kind, each in found.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("prompts")
    made = parts.add_parser("text")
    made.add_argument("answers", type=Path)
    for name in ("acceptance", "speed"):
        asked = parts.add_parser(name)
        asked.add_argument("config")
        asked.add_argument("draft")
        asked.add_argument("--limit", type=int, default=160, help="beginnings")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.part == "prompts":
            found: Iterable[dict[str, Any]] = requests(False, DRAWS)
        elif args.part == "text":
            found = ({"text": each} for each in text(args.answers))
        else:
            measured = acceptance if args.part == "acceptance" else speed
            found = measured(args.config, args.draft, args.limit, Path(folder))
        for line in found:
            say(**line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
