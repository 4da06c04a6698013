"""Conversations to tokens: a chat template, and which of its tokens are targets.

A token is a target if any of its characters is in a span of the assistant: between `{% generation %}` and
`{% endgeneration %}`, or without these tags what a message adds to the rendering of the messages before it, with the
generation prompt. Templates ignore fields that they do not know, so each new shape of a conversation is also rendered
with marks as the names of its tools, tool calls and reasoning: a mark that is not in the text is an error.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os.path import commonprefix
from typing import Any

import numpy as np

from octavo.train.config.run_config import ConfigError, naming, one_line
from octavo.train.config.sections import Data, expand
from octavo.train.data.tokenizer import TextTokenizer

MESSAGES, SHAREGPT = "messages", "conversations"
"""Fields of conversations; the second is read where `data.messages_field` is the first and a row has none."""
TOOLS, CALLS = "tools", "tool_calls"  # Fields of a row and of a message: lists, or JSON text of one
ALPACA = ("instruction", "input", "output")  # Fields of an instruction, its input if there is one, and the answer
CALL = "function_call"  # Role in ShareGPT of an assistant's calls as JSON text; OpenAI's older field of one call
ROLES = dict.fromkeys(("gpt", "chatgpt", "bard", "bing", CALL), "assistant") | {"human": "user", "observation": "tool"}
"""Roles of ShareGPT that have other names."""
REASONING = ("reasoning_content", "reasoning", "thinking")  # Fields of a message with the reasoning before its content
FUNCTION = '{"type": "function", "function": {"name": "…", "%s": {…}}}'
PLAIN = "plain"
PLAIN_TEMPLATE = (
    "{% if tools %}{{ '<|tools|>\n' + tools | tojson + eos_token + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% set reasoning = message.reasoning_content or message.reasoning or message.thinking %}"
    "{% if reasoning %}{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' if message['content'] or not loop.first }}"
    "{% set function = {'name': call.function.name, 'arguments': call.function.arguments} %}"
    "{{ '<tool_call>\n' + function | tojson + '\n</tool_call>' }}{% endfor %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""The template "plain": roles as text and the end token, which every tokenizer has, after each message."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "\ue000text\ue001"  # Stands for a message's text, to find where a template puts it: Unicode's private characters
Messages = list[dict[str, Any]]
CONVERSATION_LIMIT = 4 << 20
"""Longest conversation in characters: it is encoded at once, in 100 to 200 times as many bytes of memory."""


class Conversation(str):
    """A conversation as a document, which `conversation_text` writes."""

    where: object = ""  # Its file and line, for errors


class Chat:
    def __init__(self, tokenizer: TextTokenizer, template: str, loss_on: str) -> None:
        self.tokenizer = replace(tokenizer, chat_template=template)  # The tokenizer; `save` writes the template with it
        self._template, self._assistant = template, loss_on == "assistant"
        self._tagged = bool(GENERATION.search(template))
        self._hf: Any = self.tokenizer.as_transformers()
        self._text_arguments = False  # Whether the template prints arguments as they are, of objects Python's form
        self._checked: set[str] = set()  # Shapes of conversations of which the template is known to drop nothing
        if self._assistant and not self._hf.is_fast:
            problem = f"{type(self._hf).__name__} is written in Python and does not tell which characters a token is of"
            remedy = 'convert it to tokenizer.json, or set data.loss_on = "all"'
            raise ConfigError(f'{problem}, which data.loss_on = "assistant" needs: {remedy}')

    def encode(self, conversations: list[str]) -> list[tuple[list[int], np.ndarray | None]]:
        """The ids of conversations, as `conversation_text` writes them, and which are targets: bool, None for all."""
        # Raises ConfigError for a conversation that the template does not take, or of which no token is a target.
        rendered = []
        for conversation in conversations:
            with _at(getattr(conversation, "where", "")):
                rendered.append(self._render(conversation))
        encoded = self._hf(
            [text for text, _ in rendered], add_special_tokens=False, return_attention_mask=False, verbose=False,
            return_offsets_mapping=self._assistant,
        )  # fmt: skip
        if not self._assistant:
            return [(ids, None) for ids in encoded["input_ids"]]
        targets = [
            _overlaps(len(text), spans, offsets)
            for (text, spans), offsets in zip(rendered, encoded["offset_mapping"], strict=True)
        ]
        for conversation, mask in zip(conversations, targets, strict=True):
            if not mask.any():
                with _at(getattr(conversation, "where", "")):
                    raise ConfigError(f"the chat template marks no text of the assistant in {_shown(conversation)}")
        return [*zip(encoded["input_ids"], targets, strict=True)]

    def _render(self, conversation: str) -> tuple[str, list[tuple[int, int]]]:
        messages, tools = _parts(conversation)
        self._check_complete(messages, tools)
        text, spans = self._apply(messages, tools, tagged=self._tagged and self._assistant)
        if len(text) > CONVERSATION_LIMIT:
            problem = f"a conversation of {len(text):,} characters is longer than {CONVERSATION_LIMIT:,}"
            raise ConfigError(f"{problem}: cut it; it is {_shown(json.dumps(messages))}")
        if self._assistant and not self._tagged:
            own = (index for index, message in enumerate(messages) if message["role"] == "assistant")
            spans = [self._span(messages, tools, index, text) for index in own]
        return text, spans

    def _apply(
        self, messages: Messages, tools: Messages, *, tagged: bool = False, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        failure = None
        for as_text in (True,) if self._text_arguments else (False, True):
            try:
                form = _with_text_arguments(messages) if as_text else messages
                rendered: Any = render_jinja_template(
                    [form], tools=[*tools] or None, chat_template=self._template, return_assistant_tokens_mask=tagged,
                    add_generation_prompt=prompt, **self._hf.special_tokens_map,
                )  # fmt: skip
                break
            except Exception as error:  # of no common type: templates raise, and meet fields that they do not expect
                failure = failure or one_line(error)
        else:
            raise ConfigError(f"the chat template does not take {_shown(json.dumps(messages))}: {failure}")
        texts, spans = rendered
        return texts[0], spans[0] if tagged else []

    def _check_complete(self, messages: Messages, tools: Messages) -> None:
        """Raise ConfigError if the template renders nothing of a tool, of a tool call, or of reasoning."""
        # Only the last reasoning counts, with no message after it: templates may drop that of earlier turns.
        fields = [[key for key in REASONING if message.get(key)] for message in messages]
        if not (tools or any(fields) or any(CALLS in message for message in messages)):
            return
        shape = [f"{len(tools)} tools"]
        for message, keys in zip(messages, fields, strict=True):
            shape += [message["role"], f"{bool(message['content'])} {len(message.get(CALLS, ()))} {keys}"]
        if str(shape) in self._checked:
            return
        marks: dict[str, str] = {}

        def mark(what: str) -> str:
            marks[name := f"octavo{len(marks)}mark"] = what
            return name

        messages, tools = copy.deepcopy((messages, tools))
        for tool in tools:
            tool["function"]["name"] = mark('the "tools" of the row')
        for index, message in enumerate(messages):
            for call in message.get(CALLS, ()):
                name, value = (mark(f'"{CALLS}" of message {index}') for _ in range(2))
                call["function"] |= {"name": name, "arguments": {"argument": value}}
        text, _ = self._apply(messages, tools)
        if re.search(r"'argument': 'octavo\d+mark'", text):
            self._text_arguments = True
        if any(fields):
            last = max(index for index, keys in enumerate(fields) if keys)
            messages[last] |= dict.fromkeys(fields[last], mark(f'"{fields[last][0]}" of message {last}'))
            text += self._apply(messages[: last + 1], tools)[0]
        if dropped := next((what for name, what in marks.items() if name not in text), None):
            remedy = f'a file with a template that renders it, or to "{PLAIN}", or remove the field'
            problem = f"the chat template renders nothing of {dropped}, so that it would not be learned"
            raise ConfigError(f"{problem}: set data.chat_template to {remedy}")
        self._checked.add(str(shape))

    def _span(self, messages: Messages, tools: Messages, index: int, text: str) -> tuple[int, int]:
        """Where message `index` is in the rendered conversation, from the renderings of its beginnings."""
        through, _ = self._apply(messages[: index + 1], tools)
        before, plain = "", ""
        if index:
            plain, _ = self._apply(messages[:index], tools)
            before, _ = self._apply(messages[:index], tools, prompt=True)
        start = len(before)
        if before == plain:  # no generation prompt: the span begins with the text of the message
            message = messages[index]
            texts = dict.fromkeys(("content", *(key for key in REASONING if key in message)), MARK)
            marked, _ = self._apply([*messages[:index], message | texts], tools)
            start = marked.find(MARK, start)  # the text itself may also occur in what comes before it
            before = marked[: max(0, start)]
            if start < 0 and CALLS in message:  # calls in place of text: what comes before both is the template's
                other, _ = self._apply([*messages[:index], {"role": message["role"], "content": MARK}], tools)
                shared = commonprefix((through, other.partition(MARK)[0]))  # noqa: RUF071
                before = max(plain, shared, key=len)
                start = len(before)
        if start < 0 or not through.startswith(before) or not text.startswith(through):
            problem = f"the chat template has no {{% generation %}} tags, and message {index} of a conversation"
            reason = "it renders the same messages differently when others follow, or without their text"
            remedy = f'set data.chat_template to a file with the template and these tags, or to "{PLAIN}"'
            remedy += f', or data.loss_on = "all"; it is {_shown(json.dumps(messages))}'
            raise ConfigError(f"{problem} cannot be found in what it renders, because {reason}: {remedy}")
        added = through[start:]
        if any(added.rstrip().endswith(token) for token in self._hf.all_special_tokens):
            added = added.rstrip()  # white space after the token that ends a turn is not the assistant's
        return start, start + len(added)


def chat_template(data: Data, tokenizer: TextTokenizer | None) -> str:
    """The template of `data.chat_template`, else of the tokenizer; None for a tokenizer that is still to be trained."""
    # Raises ConfigError if there is none, or it is not a Jinja template.
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    if data.chat_template == PLAIN:
        return PLAIN_TEMPLATE
    where = "the tokenizer"
    if data.chat_template is not None:
        path = expand(data.chat_template)
        where = f"data.chat_template = {path}"
        with naming(f"{where} cannot be read", OSError, UnicodeDecodeError):
            template = path.read_text(encoding="utf-8-sig")
    else:
        if tokenizer is None or tokenizer.pretrained is None or not tokenizer.pretrained.chat_template:
            what = "a tokenizer that is trained on the data has" if tokenizer is None else "the tokenizer has"
            problem = f'data.format = "messages" needs a chat template, and {what} none'
            raise ConfigError(f'{problem}: set data.chat_template = "{PLAIN}", or to a file with a Jinja template')
        try:
            template = tokenizer.pretrained.get_chat_template()
        except ValueError as error:  # several without a default
            raise ConfigError(f"the tokenizer's chat template: {one_line(error)}; set data.chat_template") from None
    try:
        render_jinja_template([[{"role": "user", "content": ""}]], chat_template=template)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
        raise ConfigError(f"{where}: the chat template is not valid Jinja: {reason}") from None
    except Exception:  # it may not take this conversation: those of the data will tell
        pass
    if not template.strip():
        raise ConfigError(f"{where}: the chat template is empty")
    return template


def messages_of(row: Mapping[str, object], name: str) -> object:
    """The messages of a row: its field `name`, its ShareGPT "conversations", or those of an Alpaca instruction."""
    value = row.get(name)
    if value is None and name == MESSAGES:
        value = row.get(SHAREGPT)
    if value is not None or not isinstance(row.get("instruction"), str) or not row.get("output"):
        return value
    texts = [text for text in (row["instruction"], row.get("input")) if text]
    # No text of what is none: `conversation_text` refuses the question as it is.
    question = "\n\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else {"input": row["input"]}
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def conversation_text(where: object, messages: object, tools: object = None) -> Conversation:
    """A conversation as a document: JSON of its messages, or of `{"messages": …, "tools": …}` if it has tools."""
    # Raises ConfigError, beginning with `where`, for anything but a list of messages, with a role and a content or tool
    # calls, of which one is the assistant's, and a list of tools.
    listed, rows = _decoded(messages), []
    with _at(where):
        if not isinstance(listed, list) or not listed:
            raise ConfigError(f'expected messages, as [{{"role": "user", "content": "…"}}, …]; got {messages!r:.80}')
    for number, message in enumerate(map(_decoded, listed)):
        with _at(where, f"message {number}"):
            rows.append(_message(message))
    with _at(where):
        if all(row["role"] != "assistant" for row in rows):
            roles = ", ".join(dict.fromkeys(row["role"] for row in rows))
            raise ConfigError(f'no message has the role "assistant", so that there is nothing to learn ({roles})')
        schemas = _functions(TOOLS, tools) if tools else []
    text = Conversation(json.dumps({"messages": rows, "tools": schemas} if schemas else rows, ensure_ascii=False))
    text.where = where
    return text


@contextmanager
def _at(*place: object) -> Iterator[None]:
    """Begin an error with the place, which is written only then: it may have to count the lines of a file."""
    try:
        yield
    except ConfigError as error:
        where = ", ".join(filter(None, map(str, place)))
        raise ConfigError(f"{where}: {error}" if where else f"{error}") from None


def _message(message: object) -> dict[str, Any]:
    """A message without null fields, with role and content; of ShareGPT, {"from": "human", "value": …}, renamed."""
    if not isinstance(message, dict):
        raise ConfigError(f'expected {{"role": …, "content": …}}; got {message!r:.80}')
    row = {key: value for key, value in message.items() if value is not None}
    if "role" not in row and isinstance(row.get("from"), str):
        role = row.pop("from")
        row["role"] = ROLES.get(role, role)
        if role == CALL and "value" in row:
            row[CALLS] = row.pop("value")
    if "content" not in row and "value" in row:
        row["content"] = row.pop("value")
    older = row.pop(CALL, None)
    if calls := _functions(CALLS, row.pop(CALLS, None) or ([{"function": older}] if older else [])):
        row = {"content": "", **row, CALLS: calls}
    for key in ("role", "content"):
        if key not in row:
            raise ConfigError(f'no "{key}", only {", ".join(map(repr, row)) or "nothing"}')
    for key in ("role", "content", *REASONING):
        if not isinstance(row.get(key, ""), str):
            raise ConfigError(f'"{key}" should be text, got {row[key]!r:.80}')
    return row


def _decoded(value: object) -> object:
    """The value of JSON text; other text, and what is no text, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _functions(name: str, value: object) -> Messages:
    """The tools, or the tool calls, of the field `name`, as `{"type": "function", "function": …}`."""
    items: Messages = []
    field = "arguments" if name == CALLS else "parameters"
    listed = _decoded(value) or []
    for number, item in enumerate(map(_decoded, listed) if isinstance(listed, list) else [listed]):
        fields = item if isinstance(item, dict) else {}
        fields = fields if "function" in fields else {"type": "function", "function": fields}
        function = dict(fields["function"]) if isinstance(fields["function"], dict) else {}
        if name == CALLS:
            unknown = function.keys() & {"parameters", "input"}
            function["arguments"] = None if unknown else _decoded(function.get("arguments") or "{}") or {}
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments", {}), dict):
            form = f'"{name}" should be [{FUNCTION % field}, …]'
            raise ConfigError(f"{form}, and item {number} is {item!r:.120}")
        items.append(fields | {"function": function})
    return items


def _with_text_arguments(messages: Messages) -> Messages:
    messages = copy.deepcopy(messages)
    for call in (call for message in messages for call in message.get(CALLS, ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


def _parts(conversation: str) -> tuple[Messages, Messages]:
    value = json.loads(conversation)
    return (value["messages"], value["tools"]) if isinstance(value, dict) else (value, [])


def content(text: str) -> str:
    """Text, or of a conversation the texts of messages without roles and template, to train a tokenizer on."""
    if not isinstance(text, Conversation):
        return text
    messages, tools = _parts(text)
    values = [row[key] for row in messages for key in (*REASONING, "content", CALLS) if key in row]
    values += [tools] * bool(tools)
    return "\n".join(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)


def fingerprint(template: str, loss_on: str) -> str:
    """Hash of what affects ids and targets beside the tokenizer."""
    return "chat 3 " + hashlib.sha256(f"{loss_on}\0{template}".encode()).hexdigest()


def _overlaps(length: int, spans: list[tuple[int, int]], offsets: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens have a character in a span: bool [tokens]."""
    inside = np.zeros(length + 1, np.int64)
    for start, stop in spans:
        inside[start + 1 : stop + 1] = 1
    before = np.cumsum(inside)
    first, last = np.array(offsets, np.int64).reshape(-1, 2).T
    overlaps: np.ndarray = before[last] > before[first]
    return overlaps


def _shown(conversation: str) -> str:
    return conversation if len(conversation) <= 160 else f"{conversation[:160]}…"
