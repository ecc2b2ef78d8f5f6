"""From chat messages to a prompt, by the model's own Jinja template.

Not for: the reply (`openai.py`).
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem_engine.replies import RequestError
from tandem_engine.wire import ChatBody


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:  # noqa: ANN401 - jinja2's Template, kept out of our types
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def prompt_of(template: str, body: ChatBody) -> str:
    """The prompt text; raises `RequestError` when the template does not take these messages."""
    messages = [_plain(message) for message in body.messages]
    try:
        text: str = _compiled(template).render(
            messages=messages,
            tools=body.tools,
            add_generation_prompt=True,
            **(body.chat_template_kwargs or {}),
        )
    except (TemplateError, TypeError, ValueError) as problem:
        raise RequestError(f"the chat template does not take these messages: {problem}") from None
    return text


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one string: parts of text are joined, others refused."""
    if not isinstance(message.get("role"), str):
        raise RequestError("every message needs a role")
    content = message.get("content")
    if content is None:
        return message | {"content": ""}
    if isinstance(content, str):
        return message
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return message | {"content": "".join(part["text"] for part in content)}
    raise RequestError("content must be a string or a list of text parts")
