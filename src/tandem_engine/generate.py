"""`POST /generate`, SGLang's native route: what a body asks for and what a reply looks like.

Not for: the OpenAI routes (`openai.py`).
"""

import time

from tandem_engine import scoring
from tandem_engine.host import Host
from tandem_engine.replies import RequestError
from tandem_engine.request import Finish, Output, Request, Score, ScoresWanted
from tandem_engine.serving import Live, open_request, tokens_of
from tandem_engine.wire import GenerateBody, SamplingParams


def open_generate(worker: Host, body: GenerateBody) -> Live:
    """The request of a `/generate` body; raises `RequestError`."""
    worker.check_open()
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give exactly one of text and input_ids")
    prompt = body.input_ids
    if body.text is not None:
        prompt = tokens_of(worker, body.text)
    prompt = list(prompt or ())
    scores = None
    if body.return_logprob:
        start = body.logprob_start_len if body.logprob_start_len is not None else -1
        start = len(prompt) if start < 0 else start
        if start > len(prompt):
            raise RequestError(
                f"logprob_start_len {start} is beyond the prompt of {len(prompt)} tokens"
            )
        scores = ScoresWanted(start, body.top_logprobs_num or 0)
    return open_request(
        worker, body, prompt, body.sampling_params or SamplingParams(), scores=scores
    )


class GenerateReply:
    """The reply so far; grows with every output, as SGLang's does (text and ids are cumulative)."""

    def __init__(self, worker: Host, request: Request, *, texts: bool = False) -> None:
        """Empty; `texts` gives tokens their text beside their log-probability."""
        self._piece = worker.model.piece if texts else None
        self._request = request
        self._prefill = worker.settings.disaggregation_mode == "prefill"
        self._text = ""
        self._ids: list[int] = []
        self._scores: list[Score] = []
        self._finish: Finish | None = None

    def add(self, output: Output) -> None:
        """Take one output."""
        self._text += output.text
        self._ids += output.tokens
        self._scores += output.scores
        self._finish = output.finish

    def body(self) -> dict[str, object]:
        """The JSON object, complete or as one chunk of a stream."""
        request = self._request
        meta: dict[str, object] = {
            "id": request.rid,
            "finish_reason": self._reason(),
            "prompt_tokens": len(request.prompt),
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": len(self._ids),
            "cached_tokens": request.cached,
            "e2e_latency": time.monotonic() - request.arrived_s,
        }
        if request.scores is not None:
            given, made = request.input_scores, self._scores
            meta |= {
                "input_token_logprobs": [scoring.shown(s, self._name) for s in given],
                "output_token_logprobs": [scoring.shown(s, self._name) for s in made],
            }
            if request.scores.top:
                meta |= {
                    "input_top_logprobs": [scoring.shown_top(s, self._name) for s in given],
                    "output_top_logprobs": [scoring.shown_top(s, self._name) for s in made],
                }
        return {"text": self._text, "output_ids": self._ids, "meta_info": meta}

    def _name(self, token: int) -> str | None:
        return None if self._piece is None else self._piece(token).decode("utf-8", "replace")

    def _reason(self) -> dict[str, object] | None:
        finish = self._finish
        if finish is None:
            return None
        if finish.kind == "length":
            return {"type": "length", "length": 0 if self._prefill else len(self._ids)}
        if finish.kind == "stop":
            return {"type": "stop", "matched": finish.matched}
        return {"type": "abort", "message": finish.message, "status_code": finish.status}

    def chunk(self, output: Output) -> list[object]:
        """The events of one output in a stream."""
        self.add(output)
        return [self.body()]

    def complete(self) -> object:
        """The reply of a request that was not streamed."""
        return self.body()
