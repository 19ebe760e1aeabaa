"""A small training corpus on every machine with Python: the standard library's docstrings, parsed in a fixed order.
Trains the byte-level BPE tokenizer on it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .training_text import TrainingTextError, files_in, hash_of, is_held_out, read_documents

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('role must be system, user or assistant, not ' + message['role']) }}{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "tkinter"}
"""Folders of the standard library that distributions leave out or that hold no documentation."""
SKIPPED |= {"turtledemo", "ensurepip", "distutils"}
MAX_PIECE, MAX_ANSWER, MAX_SIGNATURE = 1600, 600, 60
"""Characters."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text, rendered as training text in one or more forms (special tokens spelled out). `held_out`: none of the
    renderings is trained on."""

    renderings: tuple[str, ...]
    held_out: bool


def _document(title: str, question: str, text: str) -> Document:
    """The first paragraph under its title, and for half of them as an answer to a question."""
    text = " ".join(text.split("\n\n")[0].split())[:MAX_ANSWER]
    plain = f"{BOS}{title}\n{text}{EOS}"
    chat = f"{BOS}<|user|>{question}{END}<|assistant|>{text}{END}"
    return Document((plain, chat) if hash_of(text) // 100 % 2 else (plain,), is_held_out(text))


def _signature(name: str, arguments: ast.arguments) -> str:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    text = ", ".join(argument for argument in names if argument not in ("self", "cls"))
    return f"{name}({text if len(text) <= MAX_SIGNATURE else '...'})"


def _in_source(tree: ast.Module, module: str) -> Iterator[Document]:
    """Documentation strings of a module, its classes and its functions, breadth first."""
    waiting: deque[tuple[str, ast.AST]] = deque([(module, tree)])
    while waiting:
        name, node = waiting.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := (ast.get_docstring(node) or "").strip()
        ):
            if isinstance(node, ast.Module):
                yield _document(f"module {name}", f"What is the module {name} for?", text)
            elif isinstance(node, ast.ClassDef):
                yield _document(f"class {name}", f"What is {name}?", text)
            else:
                yield _document(_signature(name, node.args), f"What does {name} do?", text)
        for child in getattr(node, "body", ()):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                waiting.append((f"{name}.{child.name}", child))


def python_documentation(library: Path | None = None) -> list[Document]:
    """The standard library's documentation strings, each text once. `library` defaults to this Python's."""
    root = library or Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).parts):
        parts = file.relative_to(root).parts
        if SKIPPED & set(parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # sources kept for tools' own tests need not parse
        module = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        documents.extend(_in_source(tree, module))
    return list({document.renderings[0].split("\n", 1)[1]: document for document in reversed(documents)}.values())[::-1]


def text_files(paths: Sequence[Path]) -> list[Document]:
    """Training text (training_text.py): plain text in whole paragraphs, or JSON lines whose `text` has special tokens
    spelled out. Raises TrainingTextError."""
    texts = []
    for file in files_in(paths):
        for where, document in read_documents(file, MAX_PIECE):
            if not isinstance(document, str):
                raise TrainingTextError(f"{where}: a model from scratch has no chat template: give `text`")
            texts.append(document if file.suffix == ".jsonl" else f"{BOS}{document}{EOS}")
    return [Document((text,), is_held_out(text)) for text in texts]


def digest(documents: Sequence[Document]) -> str:
    """SHA-256 over all renderings in order: what a model card names its corpus by."""
    hasher = hashlib.sha256()
    for document in documents:
        hasher.update(json.dumps(document.renderings).encode())
    return hasher.hexdigest()


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly vocab_size entries, special tokens first, trained on what is not held
    out. Encoding with special tokens puts <|bos|> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        document.renderings[0].removeprefix(BOS).removesuffix(EOS) for document in documents if not document.held_out
    ]
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"the corpus yields {size} tokens, not {vocab_size}: use vocab_size={size} or more text")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer
