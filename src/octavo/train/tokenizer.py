"""The tokenizer: a byte-level BPE trained on the data itself, or the one that comes with a model.

Byte-level, so that any text can be encoded and none is lost; trained on a sample, because the merges of a small
vocabulary settle within a few megabytes. Either way it is a `tokenizers.Tokenizer` and the id that ends a document.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from octavo.train.config import ConfigError

END = "<|endoftext|>"
SAMPLE_CHARACTERS = 4_000_000
"""Text the BPE is trained on: two to three seconds on two cores."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and its end-of-document token."""

    backend: tokenizers.Tokenizer
    end: str
    """The token that ends a document."""

    @property
    def end_id(self) -> int:
        """Id of the end-of-document token."""
        return self.backend.get_vocab(with_added_tokens=True)[self.end]

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides how text is encoded."""
        return hashlib.sha256((self.backend.to_str() + self.end).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens: text that spells one, as "<|endoftext|>", is encoded as text."""
        self.backend.encode_special_tokens = True
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def save(self, folder: Path) -> None:
        """Writes the files `AutoTokenizer.from_pretrained(folder)` reads."""
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_object=self.backend, eos_token=self.end).save_pretrained(str(folder))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Trains a byte-level BPE of `vocab_size` ids (fewer where the text has fewer merges) on a sample of `texts`."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(texts), trainer)
    return TextTokenizer(backend, END)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Loads the tokenizer of a `transformers` checkpoint folder. Raises ConfigError where it cannot serve."""
    from transformers import AutoTokenizer  # two seconds to import, and not every caller loads one

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer could be loaded from {folder}: {error}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"the tokenizer in {folder} has no fast form (tokenizer.json)")
    if tokenizer.eos_token is None:
        raise ConfigError(f"the tokenizer in {folder} has no eos_token, which is needed to end documents")
    backend.no_truncation()
    backend.no_padding()
    return TextTokenizer(backend, tokenizer.eos_token)


def has_tokenizer(folder: Path) -> bool:
    """True where a checkpoint folder holds a tokenizer."""
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)
