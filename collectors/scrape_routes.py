"""``/v1/targets`` on the collector: which endpoints are scraped, for whom, and how they do.

POST   {"pid": 123, "run_id": "r", "attempt": 1, "targets": [{"name": "engine", "url": "http://host:8000/metrics"}]}
DELETE {"pid": 123} or {"pid": 123, "name": "engine"}
GET
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from collectors.payload import PayloadError
from collectors.scrape import Scraper, TooMany
from rlinsight.config import ScrapeTarget


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pid: int = Field(gt=0)
    run_id: str | None = None
    attempt: int | None = None
    targets: list[ScrapeTarget]


class _Unwanted(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pid: int = Field(gt=0)
    name: str | None = None


def routes(
    scraper: Scraper, authorize: Callable[[Request], None], read_json: Callable[[Request], Awaitable[dict[str, Any]]]
) -> list[Route]:
    """The routes; each asks for the token first."""

    async def targets(request: Request) -> Response:
        authorize(request)
        try:
            if request.method == "POST":
                asked = _Asked.model_validate(await read_json(request))
                scraper.add(asked.pid, asked.run_id, asked.attempt, asked.targets)
            elif request.method == "DELETE":
                unwanted = _Unwanted.model_validate(await read_json(request))
                scraper.remove(unwanted.pid, unwanted.name)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            raise PayloadError(
                400, "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems)
            ) from None
        except TooMany as error:
            raise PayloadError(400, str(error)) from None
        return JSONResponse({"targets": scraper.status()})

    return [Route("/v1/targets", targets, methods=["GET", "POST", "DELETE"])]
