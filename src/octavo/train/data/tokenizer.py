"""The tokenizer: a byte-level BPE trained on a sample of the data, or the tokenizer of a model, in any layout.

Text is encoded without special tokens, and the end-of-document token follows each document; there is no BOS token.
"""

import copy
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from octavo.train.config.run_config import ConfigError, one_line

END = "<|endoftext|>"
SAMPLE_CHARACTERS = 4_000_000  # Characters of the sample that trains the BPE: two to three seconds on two cores


@dataclass(frozen=True)
class TextTokenizer:
    backend: tokenizers.Tokenizer  # The encoder; for a `pretrained` tokenizer written in Python, only its vocabulary
    end: str  # The token that ends a document
    pretrained: Any = None  # The model's tokenizer from Transformers; None for a trained BPE
    chat_template: str | None = None  # The chat template to save with it; None for its own

    @property
    def end_id(self) -> int:
        return self.backend.get_vocab(with_added_tokens=True)[self.end]

    @property
    def size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that affects the encoding."""
        digest = hashlib.sha256((self.backend.to_str() + self.end).encode())
        if self._in_python:
            with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
                for path in sorted(map(Path, self.pretrained.save_pretrained(folder))):
                    digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()

    @property
    def _in_python(self) -> bool:
        return self.pretrained is not None and not self.pretrained.is_fast

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encode texts without special tokens; a text such as "<|endoftext|>" is encoded as plain text."""
        if self._in_python:
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            encoded: list[list[int]] = self.pretrained(texts, **options).input_ids
            return encoded
        self.backend.encode_special_tokens = True
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, with special tokens; a part of a character becomes "\ufffd"."""
        if self._in_python:
            return str(self.pretrained.decode(ids, clean_up_tokenization_spaces=False))
        return self.backend.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(folder)` reads; for a pretrained tokenizer, all files."""
        # Raises OSError if the disk is full.
        try:
            self.as_transformers().save_pretrained(str(folder))
        except Exception as error:
            if type(error) is not Exception:  # as `tokenizers` raises for a full disk
                raise
            raise OSError(f"{folder}: {error}") from None

    def as_transformers(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        tokenizer = self.pretrained
        if tokenizer is None:
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.backend, eos_token=self.end)
        if self.chat_template is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = self.chat_template
        return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE of `vocab_size` ids (fewer if the text has fewer merges) on a sample of `texts`."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_sample(texts), trainer)
    return TextTokenizer(backend, END)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Load a tokenizer with `AutoTokenizer`, in any layout, without running code of its folder."""
    # Documents end with its `eos_token`, else its `sep_token` (BERT).
    # Raises ConfigError if there is no tokenizer, a package is missing, it needs its own code, or it has no end token.
    import transformers  # two seconds to import, and not every caller loads one

    remedy = "save one there (AutoTokenizer's save_pretrained), or give the folder of one as data.tokenizer"
    if not folder.is_dir():
        raise ConfigError(f"no tokenizer could be loaded from {folder}: it is no folder")
    custom = _custom_classes(folder)
    own_code = f"the tokenizer in {folder} needs its own code ({', '.join(custom)}), which Octavo never runs"
    own_code += ": convert it to tokenizer.json and remove auto_map from tokenizer_config.json"
    if not all(hasattr(transformers, name) for name in custom):
        raise ConfigError(own_code)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of no common type: each class and format fails in its own way
        reason = _missing_package(folder) or one_line(error)
        raise ConfigError(f"no tokenizer could be loaded from {folder}: {reason}; {remedy}") from None
    name = type(tokenizer).__name__
    if custom and name.removesuffix("Fast") not in {other.removesuffix("Fast") for other in custom}:
        raise ConfigError(f"{own_code}; {name} of Transformers may encode differently")
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):  # a class made without any of its files
        names = ", ".join(dict.fromkeys((*type(tokenizer).vocab_files_names.values(), "tokenizer.json")))
        raise ConfigError(f"{folder} holds no tokenizer: none of the files of {name} ({names}); {remedy}")
    end = tokenizer.eos_token or tokenizer.sep_token
    if end not in tokenizer.get_vocab():
        problem = f"the tokenizer in {folder} has no eos_token in its vocabulary, which is needed to end documents"
        raise ConfigError(f"{problem}: set it in tokenizer_config.json")
    tokenizer.init_kwargs["local_files_only"] = False  # save_pretrained writes how it was loaded: here the default
    if not tokenizer.is_fast:
        return TextTokenizer(tokenizers.Tokenizer(WordLevel(tokenizer.get_vocab(), unk_token=end)), end, tokenizer)
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return TextTokenizer(backend, end, tokenizer)


def _custom_classes(folder: Path) -> list[str]:
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        classes = settings.get("auto_map", {})
        classes = classes.get("AutoTokenizer") if isinstance(classes, dict) else classes
    except (OSError, ValueError, AttributeError):  # none, or one that AutoTokenizer refuses
        return []
    return [str(name).rpartition(".")[2] for name in (classes if isinstance(classes, list) else [classes]) if name]


def _missing_package(folder: Path) -> str:
    """The missing package for the folder's vocabulary; "" if none is. Transformers' error may name the wrong one."""
    for path in sorted((*folder.glob("*.model"), *folder.glob("*.tiktoken"))):
        with path.open("rb") as file:
            is_text = file.readline(1000).rstrip().rpartition(b" ")[2].isdigit()  # tiktoken: base64, a space, the id
        package = "tiktoken" if is_text or path.suffix == ".tiktoken" else "sentencepiece"
        if find_spec(package) is None:
            return f"{path.name} needs a package that is not installed: pip install {package} protobuf"
    return ""


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)
