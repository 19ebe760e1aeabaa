"""vLLM's endpoints beyond the OpenAI API: /tokenize, /detokenize, /version, /load (/ping is a probe)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from ...openai.body import TOKENIZE
from ...openai.body_worker import tokenize
from ...openai.schema import PromptIds
from ...openai.validators import StrictModel, checked, json_schema, parsed, takes
from .errors import text_workers
from .state import Services, owner_of

DETOKENIZE = "/detokenize"


class DetokenizeBody(StrictModel):
    tokens: PromptIds
    model: str | None = None


class TokenizeBody(StrictModel):
    """The main fields; a body may also have the other fields of a chat or completion request."""

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    model: str | None = None
    return_token_strs: Annotated[bool | None, Field(description="Also the tokens as the vocabulary has them.")] = None


def vllm_router(services: Services, version: str) -> APIRouter:
    router = APIRouter(tags=["vllm"])

    @router.post(TOKENIZE, openapi_extra=takes(json_schema(TokenizeBody)), response_model=dict[str, Any])
    async def ids(request: Request) -> Response:
        """The ids of a text, or of a chat as the template renders it."""
        limits = services.dispatcher.limits
        most = None if limits is None else limits.max_model_len
        encoder = services.encoder.of(owner_of(request))
        async with services.bodies.read(request) as raw:
            with text_workers():
                answer = await tokenize(raw, services.served_model_name, most, encoder)
        return Response(answer, media_type="application/json")

    @router.post(DETOKENIZE, openapi_extra=takes(json_schema(DetokenizeBody)))
    async def text(request: Request) -> dict[str, Any]:
        """The text of ids."""
        async with services.bodies.read(request) as raw:
            tokens = checked(DetokenizeBody, parsed(bytes(raw))).tokens
        return {"prompt": services.text.decode(tokens, skip_special=False)}

    @router.get("/version")
    async def which() -> dict[str, Any]:
        """This program's version."""
        return {"version": version}

    @router.get("/load")
    async def load() -> dict[str, Any]:
        """How many requests are in the engines or wait for them."""
        return {"server_load": services.dispatcher.in_flight}

    return router
