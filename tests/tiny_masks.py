"""Messages, and the text that an example supervises."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_train.data.tokenize import Example

TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{% if m.role == 'tool' %}"
    "<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content or '' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if m.content else '' }}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def spans(example: Example, tokenizer: Any) -> list[str]:
    """The supervised runs of an example, each decoded token by token and joined."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask.astype(np.int8), [0]])))
    backend = tokenizer.backend_tokenizer
    return [
        backend.decode(example.input_ids[start:stop].tolist(), skip_special_tokens=False)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


def texts(examples: list[Example], tokenizer: Any) -> list[str]:
    return [text for example in examples for text in spans(example, tokenizer)]
