"""An unmodified lm-eval scores the demo's standard model over HTTP and in transformers: do the scores agree?

    python tools/benchmarks/lm_eval_check.py

Three small tasks from the standard library's documentation that no model was trained on: choosing a text's own second
half among four (`multiple_choice`), perplexity (`loglikelihood_rolling`) and greedy continuation (`generate_until`).
lm-eval's `local-completions` asks a daemon with two ranks (token ids, echo, logprobs), its `hf` loads the same folder.
Exit status 1 if they differ by more than the tolerances below. lm-eval gets an environment of its own under
--environments, made at the first call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from laddertron.tools.demos.serving import serving
from laddertron.tools.train.corpus import BOS, EOS, python_documentation
from peers.compare import environment
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs/demo-standard"
NEEDS = ["torch==2.13.0", "lm-eval[hf,api]"]
LOGPROB, SCORE, SAME_TEXTS = 1e-3, 1e-6, 1.0
"""Tolerances in fp32: a summed logprob, relative; accuracies; the share of greedy texts that are the same."""
MOST_TOKENS = 200
"""Of a text: lm-eval's two backends cut longer ones to windows of different sizes."""
SAID = "add_bos_token=True"
"""Left unsaid, lm-eval's two backends take different sides."""
TASK = {"dataset_path": "json", "test_split": "test", "target_delimiter": "", "metadata": {"version": 1.0}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--environments", type=Path, default=ROOT / "build/peers")
    args = parser.parse_args()
    python = environment(args.environments / "lm-eval", NEEDS)
    with tempfile.TemporaryDirectory(prefix="laddertron-lm-eval-") as name:
        folder = Path(name)
        tasks = write_tasks(folder, args.texts)
        ours = over_http(python, folder, tasks)
        theirs = evaluate(python, folder, tasks, "hf", f"pretrained={MODEL},dtype=float32,{SAID}", "--device", "cpu")
    return compare(ours, theirs)


def write_tasks(folder: Path, count: int) -> list[str]:
    """The tasks' texts and descriptions; their names."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = [
        text
        for document in python_documentation()
        if document.held_out
        and len(text := document.renderings[0].removeprefix(BOS).removesuffix(EOS)) > 120
        and len(tokenizer.encode(text)) < MOST_TOKENS
    ][:count]
    if len(texts) < 8:
        raise SystemExit(f"this Python's library has {len(texts)} texts that fit, at least 8 are needed")
    halves = [(text[:cut], text[cut:]) for text in texts for cut in [text.index(" ", len(text) // 2)]]
    rows: dict[str, list[dict[str, Any]]] = {"choice": [], "perplexity": [], "greedy": []}
    for number, (text, (first, second)) in enumerate(zip(texts, halves, strict=True)):
        others = [halves[(number + step) % len(halves)][1] for step in (1, 2, 3)]
        rows["choice"].append({"text": first, "choices": [*others, second], "label": 3})
        rows["perplexity"].append({"text": text})
        rows["greedy"].append({"text": first, "target": second})
    kinds: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")],
        },
        "perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity")],
        },
        "greedy": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{target}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, kind in kinds.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        about = {"task": f"laddertron_{name}", "dataset_kwargs": {"data_files": {"test": str(data)}}, **TASK, **kind}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(about))
    return [f"laddertron_{name}" for name in kinds]


def over_http(python: Path, folder: Path, tasks: list[str]) -> dict[str, Any]:
    """lm-eval's `local-completions` against `laddertron serve`."""
    config = {
        "model": {"path": str(MODEL), "served_model_name": "demo", "dtype": "float32"},
        "parallel": {"tensor_parallel_size": 2},
        "engine": {"device": "cpu", "threads": 1, "max_num_seqs": 8, "kv_cache_memory": "64MiB"},
        "daemon": {"data_dir": str(folder / "data")},
    }
    (folder / "deploy.yaml").write_text(yaml.safe_dump(config))
    with serving(folder / "deploy.yaml", folder / "serve.log", {}) as daemon:
        where = f"model=demo,base_url={daemon.url}/v1/completions,tokenizer={MODEL}"
        more = f"tokenizer_backend=huggingface,tokenized_requests=True,max_length=256,num_concurrent=4,{SAID}"
        return evaluate(python, folder, tasks, "local-completions", f"{where},{more}")


def evaluate(python: Path, folder: Path, tasks: list[str], kind: str, about: str, *more: str) -> dict[str, Any]:
    """{"results": by task, "samples": by task} of one run of lm-eval."""
    out = folder / kind
    words = [str(python), "-m", "lm_eval", "--model", kind, "--model_args", about, "--tasks", ",".join(tasks)]
    words += ["--include_path", str(folder), "--output_path", str(out), "--log_samples", "--batch_size", "8", *more]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lm-eval --model {kind} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    results = json.loads(next(out.rglob("results_*.json")).read_text())
    samples = {}
    for task in tasks:
        lines = next(out.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
        samples[task] = sorted((json.loads(line) for line in lines), key=lambda sample: sample["doc_id"])
    return {"results": results["results"], "samples": samples}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Prints the scores beside one another; 0 if they agree."""
    agree = True
    print(f"{'':40} {'laddertron':>12} {'transformers':>12}")
    for task, scores in theirs["results"].items():
        for metric, value in scores.items():
            if isinstance(value, float) and "stderr" not in metric:
                mine = ours["results"][task][metric]
                limit = SCORE if "perplexity" not in metric else LOGPROB * abs(value)
                agree &= abs(mine - value) <= limit
                print(f"{task + ' ' + metric.removesuffix(',none'):40} {mine:12.5f} {value:12.5f}")
    worst = same = count = 0.0
    for task, samples in theirs["samples"].items():
        for mine, other in zip(ours["samples"][task], samples, strict=True):
            for a, b in zip(_answers(mine), _answers(other), strict=True):
                if task.endswith("greedy"):
                    same, count = same + (a == b), count + 1
                else:
                    worst = max(worst, abs(float(a) - float(b)) / max(1.0, abs(float(b))))
    agree &= worst <= LOGPROB and same >= SAME_TEXTS * count
    print(f"largest relative difference of a logprob: {worst:.1e}; greedy texts the same: {same:.0f} of {count:.0f}")
    print("they agree" if agree else "they DIFFER")
    return 0 if agree else 1


def _answers(sample: dict[str, Any]) -> list[str]:
    """What the model said of a sample, as lm-eval writes it: logprobs of its choices or of its text, or a text."""
    answers = (response[0] for response in sample["resps"])
    return [answer if isinstance(answer, str) else answer[0] for answer in answers]  # (logprob, is it the greedy one)


if __name__ == "__main__":
    sys.exit(main())
