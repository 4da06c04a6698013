"""The data of a run: its sources, their tokenizer, what is held out of them, and their mixture."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data, EvalConfig, Model, hub_folder
from octavo.train.data.corpus import STATE, Corpus, Sequences
from octavo.train.data.documents import open_source
from octavo.train.data.stream import StreamedCorpus
from octavo.train.data.token_cache import ReadProgress, TokenizedText, open_tokens, train_on
from octavo.train.data.tokenizer import TextTokenizer, load_tokenizer
from octavo.train.record.progress import Progress

BLOCK = 100_000  # Samples of a block: the smallest share of a source is a 1/100,000


def load_corpus(data: Data, model: Model, progress: Progress, evaluation: EvalConfig | None = None) -> Sequences:
    """Tokenize the data of a run, or open it in the cache; `evaluation`: what to hold out, or to evaluate on."""
    # The tokenizer: of `data.tokenizer`, else of `model.path`, else trained. Raises ConfigError for unusable data.
    meter = ReadProgress(progress)
    folder, parts = data.tokenizer or model.path, data.parts
    tokenizer = None if folder is None else load_tokenizer(hub_folder(folder))
    own = evaluation is not None and evaluation.has_own_data
    loaded: list[Corpus | StreamedCorpus]
    if data.streaming:
        if tokenizer is None:
            problem = "data.streaming = true reads the data during the run"
            remedy = "set data.tokenizer to the folder of one, or leave data.streaming out"
            raise ConfigError(f"{problem}, and a tokenizer would be trained on all of it before: {remedy}")
        if evaluation is not None and not own:
            problem = "[eval] without a source holds out a share of all documents"
            reason = "data.streaming = true does not know before the first step"
            raise ConfigError(f"{problem}, which {reason}: set eval.source, or leave data.streaming out")
        loaded = [StreamedCorpus(part, tokenizer, progress) for part in parts]
    else:
        if tokenizer is None and len(parts) > 1:
            tokenizer = _train_tokenizer(parts, meter)
        texts = [open_tokens(part, meter, tokenizer) for part in parts]
        corpora = _training(texts, parts, None if own else evaluation)
        for part, corpus in zip(parts, corpora, strict=True):
            if corpus.cut:
                problem = f"{corpus.cut:,} of the {corpus.documents:,} documents of {part.source} are longer"
                reason = "a piece does not see those before it"
                progress.note(f"{problem} than data.sequence_length and are cut: {reason}")
        loaded = [*corpora]
    weights = [(part.source, part.weight) for part in data.sources]
    sequences: Sequences = loaded[0] if len(loaded) == 1 else Mixture(loaded, weights)
    if evaluation is not None and own:
        sequences.held_out = _evaluation(data, evaluation, sequences.tokenizer, loaded, meter)
    return sequences


def _train_tokenizer(parts: tuple[Data, ...], meter: ReadProgress) -> TextTokenizer:
    meter.stage("reading the data")
    sources = [open_source(part, meter) for part in parts]
    with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        return train_on(
            lambda: (each for number, source in enumerate(sources) for each in source.read(Path(scratch, str(number)))),
            parts[0].vocab_size, meter,
        )  # fmt: skip


def _training(texts: list[TokenizedText], parts: Sequence[Data], evaluation: EvalConfig | None) -> list[Corpus]:
    """The documents of each source to train on, with those that `evaluation` holds out: of the smallest hashes."""
    # A document that one source holds out is held out of all of them.
    if evaluation is None:
        return [Corpus(text, data, shuffle=data.shuffle) for text, data in zip(texts, parts, strict=True)]
    share, own = evaluation.share, []
    for text in texts:
        count = max(1, round(share * len(text.hashes)))
        own.append(text.hashes <= np.partition(text.hashes, count - 1)[count - 1])
    hashes = np.concatenate([text.hashes[mask] for text, mask in zip(texts, own, strict=True)])
    corpora = []
    for text, data, chosen in zip(texts, parts, own, strict=True):
        mask = np.isin(text.hashes, hashes)
        if mask.all():
            problem = f"eval.fraction = {share:g} holds out all {len(mask)} documents of {data.source}"
            different = f"of which {len(np.unique(text.hashes))} are different"
            raise ConfigError(f"{problem}, {different}: lower it, or give other data as eval.source")
        by_others = "" if np.array_equal(mask, chosen) else f" {hashlib.sha256(mask.tobytes()).hexdigest()}"
        identity = hashlib.sha256(f"{text.fingerprint}\0held out {share!r}{by_others}".encode()).hexdigest()
        corpus, corpus.held_out = (
            Corpus(text, data, shuffle=shuffle, chosen=documents, fingerprint=identity, which=which)
            for shuffle, documents, which in (
                (data.shuffle, ~mask, " without what is held out"),
                (True, mask, f" that is held out (eval.fraction = {share:g})"),
            )
        )
        corpora.append(corpus)
    return corpora


def _evaluation(
    data: Data, evaluation: EvalConfig, tokenizer: TextTokenizer, trained_on: list[Corpus | StreamedCorpus],
    meter: ReadProgress,
) -> Corpus:  # fmt: skip
    """The text of `eval.source`, or `eval.split`; prints how many of its documents are trained on."""
    if data.sources and evaluation.source is None:
        raise ConfigError("eval.split with [[data.sources]]: name the text to evaluate on as eval.source")
    source, split = evaluation.source or data.source, evaluation.split or "train"
    own = data.model_copy(update={"source": source, "split": split, "sources": (), "streaming": False})
    try:
        text = open_tokens(own, meter, tokenizer)
    except ConfigError as error:
        name = "eval.split" if evaluation.source is None else "eval.source"
        message = str(error).replace(f"data.{name[5:]} = ", f"{name} = ")
        raise ConfigError(f"{message} ({name} is read with the settings of [data])") from None
    for other in trained_on:
        if isinstance(other, StreamedCorpus):
            other.count_shared(text.hashes)
    known = [other.hashes for other in trained_on if isinstance(other, Corpus)]
    if known and (shared := int(np.isin(text.hashes, np.concatenate(known)).sum())):
        problem = f"{shared} of the {len(text.ends)} documents to evaluate on are also trained on"
        meter.progress.note(f"{problem}: the held-out loss is lower for it")
    return Corpus(text, data, shuffle=True, which=f" to evaluate on, {source}")


class Mixture(Sequences):
    """Sequences of several sources, drawn in blocks of `BLOCK`. Weights are shares of the sequences."""

    # The picks of a source are spread evenly over the block, each at a random place of its own part of it. Sample k is
    # from source i, and its sequence is sample j of that source, where j counts the earlier picks of i. Both are a
    # function of (seed, k), so a resume needs no state.

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[tuple[str, float]]) -> None:
        self._parts, self._names = parts, [name for name, _ in weights]
        largest = max(weight for _, weight in weights)  # the sum of the weights themselves may overflow
        total = sum(weight / largest for _, weight in weights)
        self._shares = [weight / largest / total for _, weight in weights]
        exact = [share * BLOCK for share in self._shares]
        self._counts = [int(number) for number in exact]
        by_remainder = sorted(range(len(exact)), key=lambda index: self._counts[index] - exact[index])
        for index in by_remainder[: BLOCK - sum(self._counts)]:  # whole numbers with the sum BLOCK
            self._counts[index] += 1
        for (name, weight), count in zip(weights, self._counts, strict=True):
            if not count:
                problem = f"data.sources: the weight {weight:g} of {name} is less than 1/{BLOCK:,}"
                raise ConfigError(f"{problem} of the sum of the weights: raise it, or leave the source out")
        self.tokenizer = next((part.tokenizer for part in parts if part.tokenizer.chat_template), parts[0].tokenizer)
        self.files = {name: entry for part in parts for name, entry in part.files.items()}
        rows = [f"{part.fingerprint} {count}" for part, count in zip(parts, self._counts, strict=True)]
        self.fingerprint = hashlib.sha256("\0".join(["mixture 1", *rows]).encode()).hexdigest()
        for name in ("documents", "tokens"):  # None if one source does not know it
            counts = [getattr(part, name) for part in parts]
            setattr(self, name, None if None in counts else sum(counts))
        if held_out := [part.held_out for part in parts if part.held_out is not None]:
            self.held_out = Mixture(held_out, weights)
        self._block = lru_cache(maxsize=4)(self._block_of)

    def state(self) -> dict[str, Any]:
        states = [part.state() for part in self._parts]
        return {key: {name: entry for state in states for name, entry in state.get(key, {}).items()} for key in STATE}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for part in self._parts:
            part.load_state(state)

    @property
    def windows(self) -> int:
        """Number of sequences until the first source repeats; at least one."""
        return max(1, min(int(part.windows / share) for part, share in zip(self._parts, self._shares, strict=True)))

    def row(self, seed: int, sample: int) -> tuple[Tensor, Tensor]:
        block, position = divmod(sample, BLOCK)
        sources, picks = self._block(seed, block)
        source = int(sources[position])
        return self._parts[source].row(seed, block * self._counts[source] + int(picks[position]))

    def size(self) -> str:
        shares = zip(self._names, self._parts, self._shares, strict=True)
        return "; ".join(f"{100 * share:.3g} % {name}: {part.size()}" for name, part, share in shares)

    def summary(self, samples: int, seed: int = 0) -> str:
        """The size, share and epochs of each source in a run of `samples` sequences."""
        lines = [f"a mixture of {len(self._parts)} sources"]
        for name, part, count in zip(self._names, self._parts, self._picked(samples, seed), strict=True):
            share, epochs = 100 * count / samples, count / part.windows
            lines.append(f"  {share:.4g} % {name}: {count:,} sequences, {epochs:.3g} epochs of {part.size()}")
        return "\n".join(lines)

    def repeats(self, samples: int, batch: int) -> str:
        """The sources that a run of `samples` sequences repeats; "" for none."""
        counts = zip(self._names, self._parts, self._picked(samples, 0), strict=True)
        return ", ".join(
            f"{name} is taken {count / part.windows:.3g} times" for name, part, count in counts if count > part.windows
        )

    def _picked(self, samples: int, seed: int) -> list[int]:
        blocks, rest = divmod(samples, BLOCK)
        last = np.bincount(self._block(seed, blocks)[0][:rest], minlength=len(self._parts))
        return [blocks * count + int(more) for count, more in zip(self._counts, last, strict=True)]

    def _block_of(self, seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample of a block, and which pick of that source in the block it is: int64 [BLOCK]."""
        generator = np.random.Generator(np.random.Philox(key=[seed, block]))
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        picks = np.concatenate([np.arange(count) for count in self._counts])
        places = (picks + generator.random(BLOCK)) / np.array(self._counts)[sources]
        order = np.argsort(places, kind="stable")
        return sources[order], picks[order]
