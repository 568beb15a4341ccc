"""Number of entries of a tokenizer: from its own files where found, else from a known name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from steptime.job.edit import read_model
from steptime.launch.keys import table_file
from steptime.launch.named_models import preset_of
from steptime.launch.nearby_files import NearbyFiles
from steptime.model.presets import model_names

_PLAIN = re.compile(
    r"(?:tokenizers?|vocab|merges?|data|datasets?|models?|workspace|path|to|your|my|the|mnt|tmp|root|home|llm|assets|hf|and|specify|file"
    r"|dir|json|txt|bpe|experiments?|runs?|outputs?|checkpoints?|work|examples?|megatron|lm|for|gpt|training|\d|[\W_])*"
)
"""Parts of file names that do not identify the tokenizer."""
_LARGEST = 64_000_000
_ADDED = {"SentencePieceTokenizer": (b"<CLS>", b"<SEP>", b"<EOD>", b"<MASK>", b"<PAD>")}
"""Tokens that a tokenizer type adds to its pieces where they lack them (Megatron-LM up to core 0.14, tokenizer/tokenizer.py,
_SentencePieceTokenizer; later only with --tokenizer-sentencepiece-legacy)."""


def reads_pieces(kind: str) -> bool:
    """Whether a tokenizer of this type may read a SentencePiece model; one that stands beside another type is not its own.

    >>> reads_pieces("QwenTokenizer"), reads_pieces("Llama2Tokenizer")
    (False, True)
    """
    return not kind.lower().startswith("qwen")


@cache
def _known() -> list[tuple[re.Pattern[str], int, str]]:
    known = table_file("vocabularies")["vocabularies"]
    return [(re.compile(item["pattern"]), int(item["entries"]), item["of"]) for item in known]


_LLAMA_2_ENTRIES = re.compile(r"(?<!code)(?<!code_)llama(?!_?[34])|mixtral_?8x7b|mistral_?7b(?!_v0_?3)")
"""Models with 32,000 entries: Llama 1 and 2, and Mistral's first two."""


def entries_of(
    kind: str, files: Iterable[str], nearby: NearbyFiles | None = None, about: str = ""
) -> tuple[int, str] | None:
    """Entries, and whose they are, of a tokenizer's type and of the files or repositories that it is made of.

    Files that are found, also in the folder of the launch file, are counted. A name that is known counts; a file with another
    name is never assumed to be the tokenizer of its type's name, nor is Llama's type, which reads any SentencePiece model, where
    nothing that the job is called (`about`) names a model with Llama 2's vocabulary. None: unknown.

    >>> entries_of("GPT2BPETokenizer", ["data/gpt2-vocab.json"]), entries_of("GPT2BPETokenizer", ["own-tokenizer/vocab.json"])
    ((50257, "GPT-2's (gpt2-vocab.json)"), None)
    """
    own = False
    for name in files:
        found_at = _own_file(name, nearby or NearbyFiles()) or Path(name)
        counted = _counted(found_at) or (_pieces(found_at, _ADDED.get(kind, ())) if reads_pieces(kind) else None)
        if counted is not None:
            return counted, f"as counted in {found_at.name}"
        hub = re.search(r"models--([^/]+?)--([^/]+)", name)  # the hub's cache, whatever snapshot
        last = "/".join(hub.groups() if hub else _last_two(name))
        if found := _by_name(last.lower()) or _sized(last.lower()) or _of_model(last):
            return found[0], f"{found[1]} ({last.rpartition('/')[2]})"
        own = own or _is_own(last)
    own = own or (kind == "Llama2Tokenizer" and not _LLAMA_2_ENTRIES.search(re.sub("[-.]", "_", about.lower())))
    found = None if own else _by_name(kind.lower())
    return (found[0], f"{found[1]} ({kind})") if found else None


_GPT2 = 50257
"""Entries of GPT-2's vocab.json."""
SIZES = ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "n_kv_heads")
"""Sizes that a job has in common with a preset, whose vocabulary it then has."""


def of_same_sizes(sizes: Mapping[str, int | None], files: Iterable[str], about: str) -> tuple[int, str] | None:
    """Entries of the presets that have these sizes and whose family the job's names (`about`) name, and the preset.

    None where there is none, two of them differ, or the tokenizer has a name of its own. GPT-2's is no SentencePiece model.

    >>> sizes = {"n_layers": 32, "hidden_sz": 4096, "inter_sz": 11008, "n_q_heads": 32, "n_kv_heads": 4}
    >>> of_same_sizes(sizes, ["your tokenizer path"], "yi15/pretrain_yi15_6b.sh"), of_same_sizes(sizes, [], "pretrain.sh")
    ((64000, "yi-6b's, whose other sizes the job has,"), None)
    >>> sizes = {"n_layers": 96, "hidden_sz": 12288, "inter_sz": 49152, "n_q_heads": 96, "n_kv_heads": 96}
    >>> of_same_sizes(sizes, ["tokenizer.model"], "gpt3/run.log"), of_same_sizes(sizes, [], "gpt3/run.log")
    (None, (50257, "gpt3-175b's, whose other sizes the job has,"))
    """
    files = [*files]
    if any(_is_own(name) for name in files):
        return None
    named = {name: read_model(name) for name in model_names() if re.search(_family(name), about.lower())}
    same = {name: model for name, model in named.items() if all(getattr(model, key) == sizes[key] for key in sizes)}
    counts = {model.vocab_sz for model in same.values()}
    if len(counts) != 1 or (counts == {_GPT2} and any(name.endswith(".model") for name in files)):
        return None
    name, model = next(iter(same.items()))
    return int(model.vocab_sz), f"{name}'s, whose other sizes the job has,"


def _family(preset: str) -> str:
    """A pattern of the family in a preset's name: qwen2.5 also as qwen-25 or qwen_2_5, or without a version at all."""
    family, *version = re.findall(r"[a-z]+|\d+", preset.partition("-")[0])
    if not version:
        return rf"(?<![a-z]){family}(?![a-z])"
    own = r"[-_.]?".join(version)
    return rf"(?<![a-z]){family}(?:[-_.]?{own}|(?![-_.]?\d+(?:[.p]\d+)?(?![\d.p]*[bm](?![a-z]))))(?![a-z])"


def _last_two(name: str) -> list[str]:
    """A file and the folder with the model's or tokenizer's name: not one inside it for its size or its tokenizer.

    >>> _last_two("/ckpt/llama3-8b-instruct/tokenizer/tokenizer.json"), _last_two("/data/tokenizer/own.model")
    (['llama3-8b-instruct', 'tokenizer.json'], ['tokenizer', 'own.model'])
    """
    parts = [part for part in name.split("/") if part]
    if "snapshots" in parts[2:-1]:  # a model's folder of the hub's cache, under another name
        parts = parts[: parts.index("snapshots")]
    inner = len(parts) > 2 and re.fullmatch(r"tokenizers?|\d+(?:\.\d+)?[bm]", parts[-2], re.IGNORECASE)
    return [parts[-3], parts[-1]] if inner and _PLAIN.fullmatch(parts[-1].lower()) else parts[-2:]


def _is_own(name: str) -> bool:
    """Whether the name of a tokenizer's file says more than that it is one."""
    return not _PLAIN.fullmatch(re.sub(r"\$\{?\w+\}?|<[^>]*>|\[[^]]*\]|[?]+", "", name).lower())


def _own_file(name: str, nearby: NearbyFiles) -> Path | None:
    """A tokenizer's file in the folder of the launch file, or one inside its folder; not another folder's file of that name."""
    inside = (nearby.path(f"{name}/{file}") for file in ("config.json", "tokenizer.json", "vocab.json"))
    folder = Path(name).name
    return nearby.path(name) or next((found for found in inside if found and found.parent.name == folder), None)


def _by_name(words: str) -> tuple[int, str] | None:
    return next(((entries, of) for pattern, entries, of in _known() if pattern.search(words)), None)


def _sized(words: str) -> tuple[int, str] | None:
    """Entries that a tokenizer's own name counts: nordic_tokenizer_131072."""
    found = re.search(r"(?:tokenizer|vocab|bpe|spm|unigram)[\w.-]*?[_-](\d{5,6})(?!\d)", words)
    return (int(found[1]), f"from {found[0]}") if found else None


def _of_model(words: str) -> tuple[int, str] | None:
    """Rows of the embedding of a model that is among the presets, by the name of its repository."""
    preset = next((found for part in words.split("/") if (found := preset_of(part))), None)
    return (int(read_model(preset).vocab_sz), f"the embedding's of {preset}") if preset else None


def _counted(path: Path) -> int | None:
    """Entries of vocab.json, tokenizer.json, a config.json, or a folder that has one of them; None where there is none."""
    try:
        if path.is_dir():
            inside = (_counted(path / name) for name in ("config.json", "tokenizer.json", "vocab.json"))
            return next((found for found in inside if found), None)
        if path.suffix != ".json" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(tree, dict):
        return None
    if isinstance(tree.get("vocab_size"), int):
        return int(tree["vocab_size"])
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict | list):
        more = [item for item in tree.get("added_tokens") or [] if item.get("content") not in model["vocab"]]
        return len(model["vocab"]) + len(more)
    whole = tree and all(isinstance(value, int) for value in tree.values())
    return len(tree) if whole else None


def _pieces(path: Path, added: Iterable[bytes]) -> int | None:
    """Entries of a SentencePiece model; None where it is none.

    Its message is fields of pieces (number 1), whose first field is their text, and then settings (google/sentencepiece
    src/sentencepiece_model.proto).
    """
    try:
        if path.suffix != ".model" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        raw = path.read_bytes()
    except OSError:
        return None
    found: list[bytes] = []
    at = 0
    while raw[at : at + 1] == b"\x0a" and at + 3 < len(raw):
        length, start = _number(raw, at + 1)
        text, inside = _number(raw, start + 1)
        if raw[start : start + 1] != b"\x0a" or inside + text > start + length or start + length > len(raw):
            return None
        found.append(raw[inside : inside + text])
        at = start + length
    had = {*found, *(piece.upper() for piece in found if piece == b"<pad>")}
    return len(found) + len(set(added) - had) if found else None


def _number(raw: bytes, at: int) -> tuple[int, int]:
    """A whole number of protobuf's encoding, seven bits a byte, and where it ends."""
    value = shift = 0
    while at < len(raw) and shift < 64:
        value, shift, at = value | (raw[at] & 127) << shift, shift + 7, at + 1
        if raw[at - 1] < 128:
            break
    return value, at
