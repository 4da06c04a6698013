"""`[data]` and `[eval]`: what a run is trained on, and what it is evaluated on."""

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from octavo.train.config.sections import Count, PathText, Section, Share

TEXT_ONLY = (
    "sources", "split", "text_field", "format", "messages_field", "chat_template", "loss_on", "packing", "streaming",
    "chunk_bytes", "cache_gib",
)  # fmt: skip
OTHER_TASKS = {
    "language": ("images", "label_dropout"),
    "image-classification": ("images", "label_dropout", "vocab_size", "tokenizer", *TEXT_ONLY),
    "image-text": ("label_dropout", *TEXT_ONLY),
    "image-generation": ("images", "vocab_size", "tokenizer", *TEXT_ONLY),
}
"""Settings of `[data]` that a task does not read."""
OF_IMAGES = ("image-classification", "image-generation")
"""Tasks whose rows are images, without text."""
Task = Literal["language", "image-classification", "image-text", "image-generation"]
SETTING_IS_FOR = {"images": "images with text", "label_dropout": "image generation"}
Format = Literal["text", "messages"]


HELD_OUT_SHARE = 0.01
"""`eval.fraction` where it is not given."""


class DataSource(Section):
    """`[[data.sources]]`: one source of a mixture."""

    source: Annotated[PathText, Field(min_length=1)]
    """As `data.source`."""
    weight: Annotated[float, Field(gt=0)]
    """Share of the run's sequences, relative to the other weights."""
    split: str | None = None
    """As `data.split`, which it replaces for this source."""
    text_field: str | None = None
    """As `data.text_field`, which it replaces for this source."""
    format: Format | None = None
    """As `data.format`, which it replaces for this source."""
    messages_field: str | None = None
    """As `data.messages_field`, which it replaces for this source."""


class Data(Section):
    """`[data]`: text or conversations in, sequences of tokens out; or images, with labels or with text."""

    task: Task = "language"
    """What is learned: the next token of text, the class of an image, the answers in conversations about images, or the
    noise in an image of a class (diffusion)."""
    source: PathText = ""
    """"python-stdlib"; a glob of .txt (each file a document), .jsonl or .parquet files (each row one); a folder, with
    files of one kind below it or written by `save_to_disk`; or a dataset of the Hub, as "name" or "name:subset".
    "python-docstrings" has conversations. For images "digits", those that scikit-learn brings along; a folder with a
    folder of images for each class, for "image-generation" also of latents (.npy); or for "image-text" a .json file of
    conversations in LLaVA's form. Required, unless there are `sources`."""
    sources: Annotated[tuple[DataSource, ...], Strict(False)] = ()
    """A mixture of several sources instead of `source`: a table `[[data.sources]]` for each, with a weight."""
    images: PathText | None = None
    """Folder of the images that a .json file names; that of the file where it is not given."""
    split: str = "train"
    """Split of a dataset, or of a folder whose file names contain one ("test.jsonl"); other sources have none."""
    text_field: str = "text"
    """Column that holds the text, in .jsonl, .parquet and datasets."""
    format: Format = "text"
    """What a document is: text, or a conversation, a list of messages with `role` and `content` in `messages_field`.
    Rows of ShareGPT (`conversations` of `from` and `value`) and Alpaca (`instruction`, `input`, `output`) are such."""
    messages_field: str = "messages"
    """Column that holds the conversations, with `format = "messages"`."""
    chat_template: PathText | None = None
    """Template of conversations: "plain", which is built in and fits any tokenizer, or a file with a Jinja template.
    The tokenizer's own where not given."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of conversations that are targets: those of the assistant's messages, or all."""
    sequence_length: Count
    """Tokens of one sequence, for "image-text" with those of the image. Not for images without text."""
    vocab_size: Annotated[int, Field(ge=257, le=1 << 20)] = 4096
    """Size of the byte-level BPE trained on the data (256 bytes, one end-of-text, the rest merges); 1048576 at most."""
    tokenizer: PathText | None = None
    """Folder of a `transformers` tokenizer to use, instead of the model's own or a trained one."""
    packing: Literal["stream", "documents", "none"] = "stream"
    """"stream": sequences are cut from one stream of all documents, and attention crosses their borders. "documents":
    whole documents are packed into sequences, and attention and positions stay inside each. "none": a document for each
    sequence, padded. In the last two a longer document is cut."""
    label_dropout: Share = 0.1
    """Share of the images whose class is left out in training, for classifier-free guidance."""
    shuffle: bool = True
    """Permute the sequences anew in each epoch; False takes them in order."""
    streaming: bool = False
    """Read and tokenize files when the run needs them, instead of all before the first step; for much data."""
    chunk_bytes: Annotated[int, Field(ge=1024)] = 64 << 20
    """Text that `streaming` tokenizes, shuffles and packs at once, from several places of the files."""
    cache_gib: Annotated[float, Field(gt=0, le=1e9)] = 16.0
    """Largest size of the tokenized chunks of `streaming` in `cache`; the oldest are removed."""
    cache: PathText = "~/.cache/octavo"
    """Folder of tokenized data and trained tokenizers; safe to delete."""

    @property
    def parts(self) -> tuple["Data", ...]:
        """The settings of each source, itself if there is one."""
        if not self.sources:
            return (self,)
        replaced = (part.model_dump(exclude={"weight"}, exclude_none=True) for part in self.sources)
        return tuple(self.model_copy(update={"sources": ()} | part) for part in replaced)

    @property
    def has_messages(self) -> bool:
        """Whether a source has conversations."""
        return any(part.format == "messages" for part in self.parts)

    @property
    def masks_targets(self) -> bool:
        """Whether some targets of a sequence do not count."""
        return self.packing != "stream" or (self.has_messages and self.loss_on == "assistant")

    @model_validator(mode="before")
    @classmethod
    def _one_target_per_image(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("task") in OF_IMAGES:
            return {"sequence_length": 1} | settings
        return settings

    @model_validator(mode="after")
    def _check_sources(self) -> "Data":
        if bool(self.source) == bool(self.sources):
            raise ValueError(
                "give either data.source or [[data.sources]], not both" if self.source
                else "missing key data.source (or tables [[data.sources]], each with a source and a weight)"
            )  # fmt: skip
        if not self.has_messages:
            for name in ("messages_field", "chat_template", "loss_on"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f'data.{name} = "{value}" is for conversations: set data.format = "messages", or leave it out'
                    )
        for name in ("chunk_bytes", "cache_gib"):
            if not self.streaming and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"data.{name} is for data.streaming = true: set it, or leave data.{name} out")
        return self

    @model_validator(mode="after")
    def _check_task(self) -> "Data":
        for name in OTHER_TASKS[self.task]:
            if getattr(self, name) != type(self).model_fields[name].default:
                kind = SETTING_IS_FOR.get(name, "text")
                raise ValueError(f'data.{name} is for {kind}, and data.task is "{self.task}": leave it out')
        if self.task in OF_IMAGES and self.sequence_length != 1:
            raise ValueError(f"data.sequence_length = {self.sequence_length}: an image has one target: leave it out")
        return self


class EvalConfig(Section):
    """`[eval]`: held-out data. Text has none without this section; of images a part is always held out."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two measurements; 0 measures at the end only. The end is always measured."""
    first: bool = False
    """Also measure before the first step."""
    source: PathText | None = None
    """Text to evaluate on, as in `data.source`. Where neither this nor `split` is given, a part of the documents of
    `data.source` is held out, and not trained on."""
    split: str | None = None
    """Split of `source` to evaluate on, or of `data.source` without one, as "validation"."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the documents to hold out, one at least; 0.01 where not given. Their hashes decide which."""
    batches: Count = 8
    """Largest number of batches, of `optim.batch` sequences, to measure on; always the same ones."""
    ema: bool = False
    """Also measure the averaged weights of `optim.ema`, as "loss_ema"."""

    @property
    def has_own_data(self) -> bool:
        """Whether the text is not held out from that to train on."""
        return self.source is not None or self.split is not None

    @property
    def share(self) -> float:
        """`fraction` with its default."""
        return HELD_OUT_SHARE if self.fraction is None else self.fraction

    @model_validator(mode="after")
    def _check_fraction(self) -> "EvalConfig":
        if self.has_own_data and self.fraction is not None:
            name = "source" if self.source is not None else "split"
            raise ValueError(
                f"eval.fraction = {self.fraction:g} holds out a part of data.source, and eval.{name} names other text: "
                "leave one of them out"
            )
        return self
