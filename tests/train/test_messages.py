"""Conversations: masks as in Transformers, losses as in plain PyTorch, templates, bad records, the example."""

import copy
import json
import re
from itertools import chain
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
import torch.nn.functional as F
from pyarrow import parquet
from tiny_runs import LLAMA, assert_resumes, load, put, recorded, rejected, sentences
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from octavo.nn.causal import IGNORE
from octavo.train import ConfigError
from octavo.train.config.sections import Data
from octavo.train.data.chat import PLAIN_TEMPLATE, Chat, content, conversation_text, messages_of
from octavo.train.data.documents import open_source
from octavo.train.data.tokenizer import load_tokenizer, train_tokenizer
from octavo.train.trainer import Trainer

TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNTAGGED = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHANGING = UNTAGGED.replace(
    "{{ m.content }}<|im_end|>{% else", "{% if loop.last %}<think>{% endif %}{{ m.content }}<|im_end|>{% else"
)
"""Earlier turns are rendered in another way, as where reasoning is dropped."""


def conversation(number, turns=2):
    words = sentences(3 * turns, seed=number).splitlines()
    messages = [{"role": "system", "content": words[0]}]
    for turn in range(turns):
        texts = zip(("user", "assistant"), words[3 * turn :], strict=False)
        messages += [{"role": role, "content": text} for role, text in texts]
    return messages


WITH_MASK = {"return_dict": True, "return_assistant_tokens_mask": True}
CONVERSATIONS = [conversation(number, 1 + number % 3) for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer([sentences(60)], 290)
    own = PreTrainedTokenizerFast(
        tokenizer_object=made.backend, eos_token=made.end, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    own.chat_template = TAGGED
    own.save_pretrained(str(folder))
    return folder


@pytest.fixture
def chats(tmp_path, tokenizer):
    path = put(tmp_path / "chats.jsonl", *({"messages": messages} for messages in CONVERSATIONS))
    return {"source": path, "format": "messages", "tokenizer": str(tokenizer), "sequence_length": 64}


@pytest.mark.parametrize("template", [TAGGED, UNTAGGED, PLAIN_TEMPLATE])
def test_ids_and_masks_are_those_of_transformers(template, tokenizer):
    theirs = AutoTokenizer.from_pretrained(str(tokenizer))
    chat = Chat(load_tokenizer(tokenizer), template, "assistant")
    rows = chat.encode([conversation_text("", messages) for messages in CONVERSATIONS])
    for messages, (ids, mask) in zip(CONVERSATIONS, rows, strict=True):
        tagged = TAGGED if template == UNTAGGED else template  # without tags Transformers has no mask
        expected = theirs.apply_chat_template(messages, chat_template=tagged, **WITH_MASK)
        assert ids == expected["input_ids"]
        assert mask is not None and mask.tolist() == [bool(mark) for mark in expected["assistant_masks"]]
        answers = [theirs.decode(ids[start:stop]) for start, stop in runs(mask.tolist())]
        end = theirs.eos_token if template == PLAIN_TEMPLATE else "<|im_end|>"
        assert answers == [m["content"] + end for m in messages if m["role"] == "assistant"]


def runs(mask):
    edges = [i for i, (a, b) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_a_template_without_a_generation_prompt(tokenizer):
    chat = Chat(load_tokenizer(tokenizer), LLAMA2, "assistant")
    texts = learned(chat, {"messages": conversation(0, 2)[1:]})
    expected = [f"{m['content']} {chat.tokenizer.end}" for m in conversation(0, 2) if m["role"] == "assistant"]
    assert [text.strip() for text in texts] == expected


@pytest.mark.parametrize("answer", ["a", "assistant", "|", "<|user|>", "the leaf"])
def test_an_answer_that_also_occurs_in_what_comes_before_it(answer, tokenizer):
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}|{% endfor %}"
    chat = Chat(load_tokenizer(tokenizer), template, "assistant")
    messages = [{"role": "user", "content": "the leaf"}, {"role": "assistant", "content": answer}]
    assert learned(chat, {"messages": messages * 2}) == [f"{answer}|"] * 2


def test_a_template_that_changes_earlier_turns(tokenizer):
    chat = Chat(load_tokenizer(tokenizer), CHANGING, "assistant")
    chat.encode([json.dumps(conversation(0, 1))])
    message = r"no \{% generation %\} tags, and message 2 of a conversation cannot be found"
    rejected(message, chat.encode, [json.dumps(conversation(0, 2))])
    assert Chat(load_tokenizer(tokenizer), CHANGING, "all").encode([json.dumps(conversation(0, 2))])[0][1] is None


@pytest.mark.parametrize("packing", ["documents", "none", "stream"])
def test_the_loss_is_the_cross_entropy_of_the_assistant(packing, make_config, chats, tokenizer):
    """Of a whole epoch, from ids and masks of Transformers and logits of each conversation alone."""
    config = make_config(
        model={"type": "llama", "config": LLAMA | {"max_position_embeddings": 4096}},
        data=chats | {"packing": packing, "sequence_length": 4000 if packing == "stream" else 256},
        precision={"parameters": "fp32"}, optim={"batch": 1},
    )  # fmt: skip
    data = load(config)
    trainer = Trainer(config, data, torch.device("cpu"))
    model = trainer.model.eval()
    theirs, total, count = AutoTokenizer.from_pretrained(str(tokenizer)), 0.0, 0
    rows = [theirs.apply_chat_template(messages, **WITH_MASK) for messages in CONVERSATIONS]
    pairs = [(row["input_ids"], row["assistant_masks"]) for row in rows]
    if packing == "stream":
        pairs = [tuple(list(chain.from_iterable(lists))[:4001] for lists in zip(*pairs, strict=True))]
    with torch.no_grad():
        for ids, mask in pairs:
            ids, mask = torch.tensor(ids), torch.tensor(mask).bool()
            logits = model(input_ids=ids[None, :-1]).logits[0].float()
            total += F.cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum").item()
            count += int(mask[1:].sum())
        ours, ours_count = 0.0, 0
        for step in range(data.windows):
            inputs, targets = data.batch(3, step, 1)
            learned = int((targets != IGNORE).sum())
            assert learned
            ours += trainer.task.loss(model, inputs, targets).item() * learned
            ours_count += learned
    assert ours_count == count
    assert ours / ours_count == pytest.approx(total / count, abs=1e-5)
    assert data.windows == {"none": len(CONVERSATIONS), "stream": 1}.get(packing, data.windows)


def test_parquet_has_the_same_conversations(make_config, chats, tmp_path):
    rows = [{"messages": [message | {"name": None} for message in messages]} for messages in CONVERSATIONS]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    ours = load(make_config(data=chats))
    other = load(make_config(data=chats | {"source": str(tmp_path / "a.parquet")}))
    assert all(torch.equal(a, b) for a, b in zip(ours.batch(0, 0, 8), other.batch(0, 0, 8), strict=True))


def test_a_run_resumes_bitwise_and_saves_the_template(make_config, chats, tmp_path):
    del chats["tokenizer"]
    config = make_config(
        data=chats | {"packing": "documents", "chat_template": "plain"}, eval={"every": 2, "fraction": 0.1},
        optim={"micro_batches": 2}, run={"save_every": 2},
    )  # fmt: skip
    seen = recorded(config, tmp_path / "whole")
    assert any("% targets" in stage for stage in seen.stages)
    assert any("are longer than data.sequence_length and are cut" in note for note in seen.notes)
    assert_resumes(config, tmp_path)
    saved = AutoTokenizer.from_pretrained(str(tmp_path / "whole" / "checkpoints" / "step-000006"))
    assert saved.chat_template == PLAIN_TEMPLATE


OK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BAD = {
    "no field": ([{"chat": []}], 'has no field "messages".*set data.messages_field'),
    "text": ([OK, {"messages": "hi"}], r"line 2: expected messages, as \[.*got 'hi'"),
    "no content": ([OK, OK, {"messages": [{"role": "user"}]}], "line 3, message 0: no \"content\", only 'role'"),
    "content of parts": ([{"messages": [{"role": "user", "content": [1]}]}], '"content" should be text'),
    "no assistant": ([{"messages": [{"role": "user", "content": "a"}]}], 'line 1: no message has the role "assistant"'),
    "message of text": ([{"messages": ["a"]}], 'line 1, message 0: expected {"role"'),
    "tools of text": ([OK, OK | {"tools": "f"}], r'line 2: "tools" should be \[{"type".*item 0 is \'f\''),
    "tool without a name": ([OK | {"tools": [{"function": {}}]}], 'line 1: "tools" should be .*item 0'),
    "calls of text": ([{"messages": [OK["messages"][0], {"role": "assistant", "tool_calls": "f"}]}],
                      'line 1, message 1: "tool_calls" should be'),
    "call without a name": ([{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}],
                            "line 1, message 0: \"tool_calls\" should be .*item 0 is {'function'"),
    "arguments": ([{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}]}],
                  'message 0: "tool_calls" should be'),
    "parameters": ([{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"a": "b"}}]}]}],
                   '"tool_calls" should be .*"arguments".*item 0 is'),
    "reasoning": ([{"messages": [OK["messages"][0] | {"thinking": [1]}]}], 'message 0: "thinking" should be text'),
    "json": ([OK, "{"], "line 2 is not JSON"),
    "empty": ([], "is empty: 0 documents"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_records(case, refuse, chats, tmp_path):
    rows, message = BAD[case]
    refuse(message=message, **chats | {"source": put(tmp_path / "bad.jsonl", *rows)})


TEMPLATES = {
    "none": (None, "a tokenizer that is trained on the data has none: set data.chat_template = \"plain\""),
    "missing file": ("nowhere.jinja", "cannot be read: .*No such file"),
    "syntax": ("{% for %}", "not valid Jinja: line 1"),
    "raises": ("{{ raise_exception('roles must alternate') }}", "does not take .*roles must alternate"),
    "marks nothing": ("{% generation %}{% endgeneration %}{{ messages[0].content }}", "marks no text of the"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_bad_templates(case, refuse, chats, tmp_path):
    template, message = TEMPLATES[case]
    del chats["tokenizer"]
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
        chats["chat_template"] = str(tmp_path / ("nowhere.jinja" if template == "nowhere.jinja" else "t.jinja"))
    refuse(message=message, **chats)


ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Add."}, {"from": "gpt", "value": "3"}]}
ANSWERS = {
    "alpaca": (ALPACA, "Add.\n\n1 and 2"), "short": ({"instruction": "Add.", "output": "3"}, "Add."),
    "sharegpt": (SHAREGPT, "Add."),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ANSWERS))
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_alpaca_and_sharegpt(tmp_path, name, suffix):
    row, question = ANSWERS[name]
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        path.write_text(f"{json.dumps(row)}\n" * 2)
    else:
        parquet.write_table(pyarrow.Table.from_pylist([row] * 2), path)
    config = Data(source=str(path), format="messages", sequence_length=16)
    texts = [text for document in open_source(config, lambda _: None).read(tmp_path) for text in document]
    expected = [{"role": "user", "content": question}, {"role": "assistant", "content": "3"}]
    assert [json.loads(text) for text in texts] == [expected] * 2


@pytest.mark.parametrize("text", [{"a": 1}, ["x", 3], 7])
def test_an_input_of_alpaca_that_is_no_text_is_refused(text):
    with pytest.raises(ConfigError, match="line 1, message 0: .content. should be text"):
        conversation_text("a.jsonl, line 1", messages_of(ALPACA | {"input": text}, "messages"))


PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8").partition("### Tool calls")[2]
ROW = json.loads(re.search(r"```json\n(.*?)```", PAGE, flags=re.S)[1])
LISTED = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
CALLS = LISTED + UNTAGGED.replace("{{ m.content }}<|im_end|>{% else", (
    "{{ m.thinking }}{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments }}]"
    "{% endfor %}<|im_end|>{% else"
))  # fmt: skip


def learned(chat, row):
    ((ids, mask),) = chat.encode([conversation_text("a.jsonl, line 1", row["messages"], row.get("tools"))])
    return [chat.tokenizer.decode(ids[start:stop]) for start, stop in runs(mask.tolist())]


def test_tool_calls_and_reasoning_are_rendered_as_the_page_shows(tokenizer):
    shown = re.search(r"```text\n(.*?)```", PAGE, flags=re.S)[1].splitlines()
    chat = Chat(load_tokenizer(tokenizer), PLAIN_TEMPLATE, "assistant")
    ((ids, _),) = chat.encode([conversation_text("", ROW["messages"], ROW["tools"])])
    assert chat.tokenizer.decode(ids).splitlines() == [line[2:] for line in shown]
    assert "\n".join(learned(chat, ROW)).splitlines() == [line[2:] for line in shown if line.startswith("▸")]


@pytest.mark.parametrize("form", ["jsonl", "text", "parquet", "json of datasets"])
def test_tool_calls_of_every_form_are_those_of_transformers(form, make_config, chats, tokenizer, tmp_path):
    rows = [copy.deepcopy(ROW) for _ in range(3)]
    calls = [row["messages"][1]["tool_calls"][0]["function"] for row in rows]
    for call, arguments in zip(calls, ({"city": "Paris"}, {"day": 1}, {}), strict=True):
        call["arguments"] = arguments  # in a table, each has the keys of all
    theirs = AutoTokenizer.from_pretrained(str(tokenizer))
    whole = [json.loads(json.dumps(row).replace('"content": null', '"content": ""')) for row in rows]
    own = {"chat_template": PLAIN_TEMPLATE, **WITH_MASK}
    expected = [theirs.apply_chat_template(row["messages"], tools=row["tools"], **own) for row in whole]
    source = tmp_path / ("a.jsonl" if form in ("jsonl", "text") else "a.parquet")
    texts = [{key: json.dumps(value) for key, value in row.items()} for row in rows]
    if source.suffix == ".jsonl":
        put(source, *(texts if form == "text" else rows))
    else:
        kind = {key: datasets.List(datasets.Json()) for key in ROW} if form != "parquet" else None
        features = datasets.Features(kind) if kind else None
        datasets.Dataset.from_list(rows, features=features).to_parquet(source)
    changes = {"source": str(source), "chat_template": "plain", "packing": "none", "sequence_length": 512}
    data = load(make_config(data=chats | changes | {"shuffle": False}))
    for step, row in enumerate(expected):
        inputs, targets = data.batch(0, step, 1)
        length = len(row["input_ids"]) - 1
        assert inputs[0, :length, 0].tolist() == row["input_ids"][:-1]
        assert (targets[0, :length] != IGNORE).tolist() == [bool(mark) for mark in row["assistant_masks"][1:]]


@pytest.mark.parametrize(
    ("replaced", "by", "before"),
    [
        ("", "", "I look it up."),
        ("add_generation_prompt", "false", "I look it up."),
        ("", "", ""),
        ("<|im_start|>{{ m.role }}\n", "{% if not m.tool_calls %}<|im_start|>{{ m.role }}\n{% endif %}", ""),
    ],
)
def test_spans_of_tool_calls_without_tags(replaced, by, before, tokenizer):
    template, row = CALLS.replace(replaced, by) if replaced else CALLS, copy.deepcopy(ROW)
    if not before:  # calls in place of text, behind the role or, as in Mistral's, alone
        template = template.replace("add_generation_prompt", "false")
        template = template.replace("{{ m.thinking }}{{ m.content }}", "{{ m.content if not m.tool_calls }}")
        del row["messages"][1]["reasoning_content"]
    texts = learned(Chat(load_tokenizer(tokenizer), template, "assistant"), row)
    assert texts == [before + '[weather{"city": "Paris"}]<|im_end|>', "Yes, it rains.<|im_end|>"]  # no Python's form


def test_templates_that_join_arguments_take_text(tokenizer):
    joined = CALLS.replace("{{ c.function.arguments }}", "{{ '' + c.function.arguments }}")
    assert '[weather{"city": "Paris"}]' in learned(Chat(load_tokenizer(tokenizer), joined, "assistant"), ROW)[0]


@pytest.mark.parametrize(
    ("left_out", "what"),
    [
        (LISTED, 'the "tools" of the row'),
        ("[{{ c.function.name }}{{ c.function.arguments }}]", '"tool_calls" of message 1'),
        ("{{ c.function.arguments }}", '"tool_calls" of message 1'),
        ("{{ m.thinking }}", '"reasoning_content" of message 1'),
    ],
)
def test_a_template_that_drops_something_is_an_error(left_out, what, tokenizer):
    tokenizer = load_tokenizer(tokenizer)
    learned(Chat(tokenizer, CALLS, "assistant"), ROW)
    for loss_on in ("assistant", "all"):
        with pytest.raises(ConfigError, match=f"^a.jsonl, line 1: the chat template renders nothing of {what}, so"):
            learned(Chat(tokenizer, CALLS.replace(left_out, ""), loss_on), ROW)


def test_reasoning_of_earlier_turns_may_be_dropped(tokenizer):
    last = TAGGED.replace("{{ m.content }}<", "{% if loop.last %}{{ m.thinking }}{% endif %}{{ m.content }}<", 1)
    talk = conversation(0, 2)
    talk[2]["thinking"] = "hm"
    chat = Chat(load_tokenizer(tokenizer), last, "assistant")
    assert learned(chat, {"messages": talk})[0] == f"{talk[2]['content']}<|im_end|>"
    assert learned(chat, {"messages": talk[:3]}) == [f"hm{talk[2]['content']}<|im_end|>"]


def test_a_tokenizer_is_trained_on_tool_calls_and_reasoning():
    text = content(conversation_text("", ROW["messages"], ROW["tools"]))
    assert {"I look it up.", "rain", "Yes, it rains."} <= set(text.splitlines()) and text.count('"weather"') == 2


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]},
        {"tool_calls": '{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'},
        {"function_call": {"name": "weather", "arguments": '{"city": "Paris"}'}},
    ],
    ids=["list", "text of one", "older form"],
)
def test_forms_of_calls(message):
    text = conversation_text("a", [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", **message}])
    (call,) = json.loads(text)[1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}


def test_calls_of_sharegpt():
    value = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
    rows = [{"from": "human", "value": "?"}, {"from": "function_call", "value": value}]
    expected = {"name": "weather", "arguments": {"city": "Paris"}}
    _, call, answer = json.loads(conversation_text("a", [*rows, {"from": "observation", "value": "rain"}]))
    assert (call["role"], call["content"], call["tool_calls"][0]["function"]) == ("assistant", "", expected)
    assert answer == {"role": "tool", "content": "rain"}
    with pytest.raises(ConfigError, match='^a, message 1: "tool_calls" should be'):
        conversation_text("a", [rows[0], rows[1] | {"value": "weather in Paris"}])
