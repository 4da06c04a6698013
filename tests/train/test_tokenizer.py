"""Tokenizers that come with a model: any layout is used as it is, and saved whole; none runs code or is made up."""

import json
from importlib.util import find_spec

import pytest
from tiny_runs import LLAMA, load
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from octavo.train.config.run_config import ConfigError
from octavo.train.data.tokenizer import load_tokenizer, train_tokenizer
from octavo.train.model import build_model

LETTERS = "abcdefghijklmnopqrstuvwxyz."
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "leaf"]
GPT2 = {token: number for number, token in enumerate(["<|endoftext|>", *LETTERS, "Ġ", "Ċ", "th", "the", "Ġt"])}
TEXT = "the leaf [SEP] folds <|endoftext|>"
FILES = {
    "vocab.txt": {"config.json": {"model_type": "bert"}, "vocab.txt": "\n".join(BERT)},
    "vocab.txt of a named class": {
        "config.json": {"model_type": "llama"}, "vocab.txt": "\n".join(BERT),
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    },
    "vocab.json and merges.txt": {
        "config.json": {"model_type": "gpt2"}, "vocab.json": GPT2, "merges.txt": "#version: 0.2\nt h\nth e\nĠ t\n",
    },
    "in Python, merges": {
        "config.json": {"model_type": "ctrl"}, "vocab.json": {"<unk>": 0, "t@@": 1, "h@@": 2, "the": 3, "</s>": 4},
        "merges.txt": "#version: 0.2\nt h\nth e</w>\n", "tokenizer_config.json": {"eos_token": "</s>"},
    },
    "in Python, bytes": {
        "config.json": {"model_type": "llama"}, "tokenizer_config.json": {"tokenizer_class": "ByT5Tokenizer"},
    },
}  # fmt: skip
REFUSED = {
    "nothing": ({}, "no tokenizer could be loaded .*save one there.*data.tokenizer"),
    "llama": ({"config.json": {"model_type": "llama"}}, "no tokenizer could be loaded"),
    "gpt2": ({"config.json": {"model_type": "gpt2"}}, "none of the files of GPT2Tokenizer .*vocab.json, merges.txt"),
    "bert": ({"config.json": {"model_type": "bert"}}, "none of the files of BertTokenizer"),
    "llama, named": (
        {"config.json": {"model_type": "llama"}, "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}},
        "none of the files of LlamaTokenizer .tokenizer.model, tokenizer.json.",
    ),
    "damaged": ({"config.json": {"model_type": "llama"}, "tokenizer.json": "{"}, "no tokenizer could be loaded"),
    "empty": ({"config.json": {"model_type": "llama"}, "tokenizer.json": {}}, "could be loaded from .*: KeyError"),
    "no end": ({"config.json": {"model_type": "ctrl"}, "vocab.json": {"<unk>": 0, "a": 1}, "merges.txt": "#\n"}, "eos"),
}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("layout", FILES)
def test_any_layout_is_used_as_it_is(layout, tmp_path, make_config):
    folder = write(tmp_path / "model", FILES[layout])
    theirs = AutoTokenizer.from_pretrained(str(folder))
    config = make_config(model={"path": str(folder)})
    corpus = load(config)
    ours = corpus.tokenizer
    expected = theirs([TEXT], add_special_tokens=False, split_special_tokens=True).input_ids
    assert ours.encode([TEXT]) == expected
    assert ours.end_id == theirs.convert_tokens_to_ids(theirs.eos_token or theirs.sep_token)
    assert ours.size == max(theirs.get_vocab().values()) + 1
    assert int(corpus.batch(0, 0, 4)[0].max()) < ours.size
    assert load(config).fingerprint == corpus.fingerprint
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours.save(tmp_path / "ours")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert load_tokenizer(tmp_path / "ours").encode([TEXT]) == expected


def test_everything_of_a_tokenizer_and_the_generation_config_survive(tmp_path, make_config):
    made = train_tokenizer(["the leaf folds eight times"] * 9, 280)
    source = PreTrainedTokenizerFast(
        tokenizer_object=made.backend, eos_token=made.end, bos_token="<s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<|im_end|>"], model_max_length=77, padding_side="left",
    )  # fmt: skip
    source.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    source.backend_tokenizer.enable_truncation(3)
    folder = tmp_path / "model"
    model = build_model(make_config(model={"type": "llama", "config": LLAMA | {"vocab_size": 300}}), made)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[0, 283])
    model.save_pretrained(folder)
    source.save_pretrained(str(folder))
    config = make_config(data={"tokenizer": str(folder)})
    corpus = load(config)
    assert len(corpus.tokenizer.encode(["the leaf folds eight times"] * 2)[1]) == 5  # not cut to 3
    (tmp_path / "saved").mkdir()
    corpus.tokenizer.save(tmp_path / "saved")
    original = tmp_path / "original"
    AutoTokenizer.from_pretrained(str(folder)).save_pretrained(str(original))
    assert contents(tmp_path / "saved") == contents(original)
    assert "chat_template.jinja" in contents(original)
    back = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert (back.bos_token, back.pad_token, back.unk_token, back.model_max_length) == ("<s>", "<pad>", "<unk>", 77)
    assert "<|im_end|>" in back.all_special_tokens and back.padding_side == "left"
    loaded = build_model(make_config(model={"path": str(folder)}), corpus.tokenizer)
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    assert loaded.generation_config.eos_token_id == [0, 283]


@pytest.mark.parametrize("where", REFUSED)
def test_a_pretrained_model_without_a_tokenizer_is_refused(where, tmp_path, make_config):
    files, message = REFUSED[where]
    folder = write(tmp_path / "model", files)
    config = make_config(model={"path": str(folder)})
    with pytest.raises(ConfigError, match=message) as caught:
        load(config)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("known", [False, True])
def test_code_in_the_folder_never_runs(known, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    ran = tmp_path / "ran"
    folder = write(
        tmp_path / "model",
        FILES["vocab.json and merges.txt" if known else "vocab.txt of a named class"]
        | {
            "evil.py": f"open({str(ran)!r}, 'w')\nclass EvilTokenizer: pass\n",
            "tokenizer_config.json": {
                "tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]},
            },
        },
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"needs its own code \(EvilTokenizer\), which Octavo never runs"):
        load_tokenizer(folder)
    assert not ran.exists()


def test_own_code_of_a_known_name_is_not_taken_for_another_class(tmp_path):
    settings = {"auto_map": {"AutoTokenizer": ["own.BertTokenizer", None]}}
    folder = write(tmp_path, FILES["vocab.json and merges.txt"] | {"tokenizer_config.json": settings})
    with pytest.raises(ConfigError, match=r"own code \(BertTokenizer\), .*; GPT2Tokenizer.* may encode differently"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "package"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "sentencepiece"),
        ("spiece.model", b"\n\x0e\n\x05<unk>", "sentencepiece"),
        ("tokenizer.model", b"YQ== 0\nYg== 1\n", "tiktoken"),
    ],
)
def test_a_missing_package_is_named(name, content, package, tmp_path):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    kind = "xlnet" if name == "spiece.model" else "llama"
    folder = write(tmp_path, {"config.json": {"model_type": kind}})
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} needs a package that is not installed: pip install {package}"):
        load_tokenizer(folder)
