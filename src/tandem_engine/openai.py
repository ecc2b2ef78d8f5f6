"""`/v1/chat/completions` and `/v1/completions`: what is asked for and what a reply looks like.

Not for: SGLang's native route (`generate.py`).
"""

import time

from tandem_engine.chat import prompt_of
from tandem_engine.host import Host
from tandem_engine.replies import RequestError, error_body
from tandem_engine.request import Finish, Output, Request, Score, ScoresWanted
from tandem_engine.serving import Live, open_request, tokens_of
from tandem_engine.wire import ChatBody, CompletionBody, OpenAiBody, SamplingParams


def open_chat(worker: Host, body: ChatBody) -> Live:
    """The request of a chat body; raises `RequestError`."""
    worker.check_open()
    most = worker.model.context_length
    if len(body.messages) > most:
        raise RequestError(f"{len(body.messages)} messages do not fit into {most} tokens")
    prompt = tokens_of(worker, prompt_of(worker.model.chat_template, body))
    scores = ScoresWanted(len(prompt), body.top_logprobs or 0) if body.logprobs else None
    return open_request(
        worker,
        body,
        prompt,
        _sampling(body, body.max_completion_tokens or body.max_tokens),
        max_new_tokens=None,
        scores=scores,
    )


def open_completion(worker: Host, body: CompletionBody) -> Live:
    """The request of a completion body; raises `RequestError`."""
    worker.check_open()
    prompt = body.prompt
    if isinstance(prompt, str):
        prompt = tokens_of(worker, prompt)
    scores = None
    if body.logprobs is not None:
        scores = ScoresWanted(0 if body.echo else len(prompt), body.logprobs)
    return open_request(worker, body, list(prompt), _sampling(body, body.max_tokens), scores=scores)


def _sampling(body: OpenAiBody, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        seed=body.seed,
    )


class OpenAiReply:
    """The reply so far, for both OpenAI routes."""

    def __init__(self, worker: Host, request: Request, body: OpenAiBody) -> None:
        """Empty."""
        self._worker = worker
        self._request = request
        self._chat = isinstance(body, ChatBody)
        self._usage_wanted = body.stream_options is not None and body.stream_options.include_usage
        self._model = body.model or worker.settings.served_model_name
        self._created = int(time.time())
        self._begun = False
        self._tokens = 0
        self._text = self._echo = self._echoed(body)
        self._scores: list[Score] = []
        self._finish: Finish | None = None

    def _echoed(self, body: OpenAiBody) -> str:
        """The prompt, for a client that wants it in front of the answer."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return ""
        if isinstance(body.prompt, str):
            return body.prompt
        return b"".join(map(self._worker.model.piece, body.prompt)).decode("utf-8", "replace")

    def add(self, output: Output) -> None:
        """Take one output."""
        self._text += output.text
        self._tokens += len(output.tokens)
        self._scores += output.scores
        self._finish = output.finish

    def complete(self) -> object:
        """The reply of a request that was not streamed."""
        choice: dict[str, object] = {"index": 0}
        if self._chat:
            choice["message"] = {
                "role": "assistant",
                "content": self._text,
                "reasoning_content": None,
                "tool_calls": None,
            }
        else:
            choice["text"] = self._text
        choice |= {"logprobs": self._logprobs(self._scores), **self._ended()}
        kind = "chat.completion" if self._chat else "text_completion"
        return self._envelope(kind, [choice]) | {"usage": self._usage()}

    def chunk(self, output: Output) -> list[object]:
        """The events of one output in a stream."""
        if output.finish is not None and output.finish.kind == "abort":
            return [error_body(output.finish.status, output.finish.message)]
        self.add(output)
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        events: list[object] = []
        if self._chat and not self._begun:
            self._begun = True
            role = {"role": "assistant", "content": ""}
            events.append(
                self._envelope(kind, [{"index": 0, "delta": role, "finish_reason": None}])
            )
        choice: dict[str, object] = {"index": 0}
        text, self._echo = self._echo + output.text, ""
        choice |= {"delta": {"content": text}} if self._chat else {"text": text}
        choice |= {"logprobs": self._logprobs(output.scores), **self._ended()}
        events.append(self._envelope(kind, [choice]))
        if output.finish is not None and self._usage_wanted:
            events.append(self._envelope(kind, []) | {"usage": self._usage()})
        return events

    def _envelope(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self._request.rid,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _ended(self) -> dict[str, object]:
        finish = self._finish
        if finish is None:
            return {"finish_reason": None, "matched_stop": None}
        matched = finish.matched if finish.kind == "stop" else None
        return {"finish_reason": finish.kind, "matched_stop": matched}

    def _usage(self) -> dict[str, object]:
        prompt = len(self._request.prompt)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._tokens,
            "completion_tokens": self._tokens,
            "prompt_tokens_details": {"cached_tokens": self._request.cached},
        }

    def _logprobs(self, scores: "list[Score] | tuple[Score, ...]") -> dict[str, object] | None:
        if self._request.scores is None:
            return None
        if not self._chat:
            return {
                "tokens": [self._token(s.token) for s in scores],
                "token_logprobs": [s.logprob for s in scores],
                "top_logprobs": [{self._token(t): p for p, t in s.top} for s in scores],
                "text_offset": [],
            }
        return {"content": [self._content(score) for score in scores]}

    def _content(self, score: Score) -> dict[str, object]:
        top = [self._entry(token, logprob) for logprob, token in score.top]
        return self._entry(score.token, score.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> dict[str, object]:
        piece = self._worker.model.piece(token)
        return {
            "token": piece.decode("utf-8", "replace"),
            "bytes": list(piece),
            "logprob": logprob,
        }

    def _token(self, token: int) -> str:
        return self._worker.model.piece(token).decode("utf-8", "replace")
