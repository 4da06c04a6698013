"""The data of a run: its sources, their tokenizer, and what is held out of them."""

import hashlib
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from octavo.train.config.data_section import Data, EvalConfig
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Model, expand
from octavo.train.data.corpus import Corpus
from octavo.train.data.mixture import Mixture
from octavo.train.data.sequences import Sequences
from octavo.train.data.source import open_source
from octavo.train.data.stream import StreamedCorpus
from octavo.train.data.token_cache import ReadProgress, TokenizedText, open_tokens, train_on
from octavo.train.data.tokenizer import TextTokenizer, load_tokenizer
from octavo.train.record.progress import Progress


def load_corpus(data: Data, model: Model, progress: Progress, evaluation: EvalConfig | None = None) -> Sequences:
    """Tokenize the data of a run, or open it in the cache; `evaluation`: what to hold out, or to evaluate on."""
    # The tokenizer is that of `data.tokenizer`, else of the checkpoint at `model.path`, else trained on the data.
    # Raises ConfigError for unusable data.
    meter = ReadProgress(progress)
    folder, parts = data.tokenizer or model.path, data.parts
    tokenizer = None if folder is None else load_tokenizer(expand(folder))
    if tokenizer is None and len(parts) > 1 and not data.streaming:
        tokenizer = _train_tokenizer(parts, meter)
    own = evaluation is not None and evaluation.has_own_data
    loaded: list[Corpus | StreamedCorpus]
    if data.streaming:
        loaded = [StreamedCorpus(part, _given(tokenizer, evaluation), progress) for part in parts]
    else:
        texts = [open_tokens(part, meter, progress, tokenizer) for part in parts]
        corpora = _training(texts, parts, None if own else evaluation)
        for part, of_part in zip(parts, corpora, strict=True):
            if of_part.cut:
                progress.note(
                    f"{of_part.cut:,} of the {of_part.documents:,} documents of {part.source} are longer than "
                    "data.sequence_length and are cut: a piece does not see those before it"
                )
        loaded = [*corpora]
    corpus: Sequences = (
        loaded[0] if len(loaded) == 1 else Mixture(loaded, [(part.source, part.weight) for part in data.sources])
    )
    if evaluation is not None and own:
        corpus.held_out = _evaluation(data, evaluation, corpus.tokenizer, loaded, meter, progress)
    return corpus


def _given(tokenizer: TextTokenizer | None, evaluation: EvalConfig | None) -> TextTokenizer:
    """The tokenizer of streamed data. Raises ConfigError for what would need all of the data before the first step."""
    if tokenizer is None:
        raise ConfigError(
            "data.streaming = true reads the data during the run, and a tokenizer would be trained on all of it "
            "before: set data.tokenizer to the folder of one, or leave data.streaming out"
        )
    if evaluation is not None and not evaluation.has_own_data:
        raise ConfigError(
            "[eval] without a source holds out a share of all documents, which data.streaming = true does not know "
            "before the first step: set eval.source, or leave data.streaming out"
        )
    return tokenizer


def _train_tokenizer(parts: tuple[Data, ...], meter: ReadProgress) -> TextTokenizer:
    """Train a BPE on the documents of all sources."""
    meter.stage("reading the data")
    sources = [open_source(part, meter) for part in parts]
    with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        folders = [Path(scratch) / str(number) for number in range(len(sources))]
        return train_on(
            lambda: chain.from_iterable(map(lambda source, folder: source.plain_text(folder), sources, folders)),
            parts[0].vocab_size, meter,
        )  # fmt: skip


def _training(
    texts: Sequence[TokenizedText], parts: Sequence[Data], evaluation: EvalConfig | None
) -> list[Corpus]:  # fmt: skip
    """The documents of each source to train on, with those that `evaluation` holds out."""
    # A document that one source holds out is held out of all of them.
    if evaluation is None:
        return [Corpus(text, data, shuffle=data.shuffle) for text, data in zip(texts, parts, strict=True)]
    own = [_held_out(text, evaluation) for text in texts]
    hashes = np.concatenate([text.hashes[mask] for text, mask in zip(texts, own, strict=True)])
    masks = [np.isin(text.hashes, hashes) for text in texts]
    return [
        _without_held_out(text, data, evaluation.share, mask, by_others=not np.array_equal(mask, chosen))
        for text, data, mask, chosen in zip(texts, parts, masks, own, strict=True)
    ]


def _without_held_out(
    text: TokenizedText, data: Data, fraction: float, mask: np.ndarray, *, by_others: bool
) -> Corpus:  # fmt: skip
    """A source without the documents of `mask`: bool [documents]. `by_others`: other sources hold out some of them."""
    if mask.all():
        raise ConfigError(
            f"eval.fraction = {fraction:g} holds out all {len(mask)} documents of {data.source}, of which "
            f"{len(np.unique(text.hashes))} are different: lower it, or give other data as eval.source"
        )
    chosen = f" {hashlib.sha256(mask.tobytes()).hexdigest()}" if by_others else ""
    identity = hashlib.sha256(f"{text.fingerprint}\0held out {fraction!r}{chosen}".encode()).hexdigest()
    corpus = Corpus(
        text, data, shuffle=data.shuffle, chosen=~mask, fingerprint=identity, which=" without what is held out"
    )
    corpus.held_out = Corpus(
        text, data, shuffle=True, chosen=mask, fingerprint=identity,
        which=f" that is held out (eval.fraction = {fraction:g})",
    )  # fmt: skip
    return corpus


def _evaluation(
    data: Data, evaluation: EvalConfig, tokenizer: TextTokenizer, trained_on: list[Corpus | StreamedCorpus],
    meter: ReadProgress, progress: Progress,
) -> Corpus:  # fmt: skip
    """The text of `eval.source`, or `eval.split`; prints how many of its documents are trained on."""
    if data.sources and evaluation.source is None:
        raise ConfigError("eval.split with [[data.sources]]: name the text to evaluate on as eval.source")
    source, split = evaluation.source or data.source, evaluation.split or "train"
    own = data.model_copy(update={"source": source, "split": split, "sources": (), "streaming": False})
    try:
        text = open_tokens(own, meter, progress, tokenizer)
    except ConfigError as error:
        name = "eval.split" if evaluation.source is None else "eval.source"
        message = str(error).replace(f"data.{name[5:]} = ", f"{name} = ")
        raise ConfigError(f"{message} ({name} is read with the settings of [data])") from None
    corpus = Corpus(text, data, shuffle=True, which=f" to evaluate on, {source}")
    is_shared = np.zeros(len(text.hashes), bool)
    for other in trained_on:
        if isinstance(other, StreamedCorpus):
            other.count_shared(text.hashes)
        else:
            is_shared |= np.isin(text.hashes, other.hashes)
    if shared := int(is_shared.sum()):
        progress.note(
            f"{shared} of the {len(text.ends)} documents to evaluate on are also trained on: the held-out loss is "
            "lower for it"
        )
    return corpus


def _held_out(text: TokenizedText, evaluation: EvalConfig) -> np.ndarray:
    """Which documents a source holds out: bool [documents]."""
    count = max(1, round(evaluation.share * len(text.hashes)))
    mask: np.ndarray = text.hashes <= np.partition(text.hashes, count - 1)[count - 1]
    return mask
