"""`/openapi.json`: a description of this server's API, built from its own routes and messages.

- Paths, parameters and their patterns are read from the routes, summaries from the handlers' docstrings, so that the
  document is complete; only the types of the bodies are listed in the tables below.
- Programs' bodies are canonical MessagePack. Their schemas are those of the decoded message; byte strings are `binary`.
- A node wraps its message in a request signed by its key; docs/protocol.md specifies how.
"""

import inspect
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from aiohttp import web
from pydantic.json_schema import models_json_schema

from coordinator.api.http import MSGPACK
from coordinator.endpoint.requests import PRIORITY_MAX
from ledger import payout_proof, proof, witness
from protocol import limits
from protocol.errors import ERRORS
from protocol.people import owner
from protocol.policy.origin import OriginList
from protocol.wire.message import Message
from protocol.work import appeal, auditing, learning, messages

Kind = type[Message]
Routes = Sequence[web.AbstractRouteDef]

JSON = "application/json"
BYTES = "application/octet-stream"

SIGNED: dict[str, tuple[Kind, Kind]] = {
    "/v1/nodes": (messages.Register, messages.HeartbeatReply),
    "/v1/heartbeat": (messages.Heartbeat, messages.HeartbeatReply),
    "/v1/versions": (messages.VersionRequest, messages.HeartbeatReply),
    "/v1/leases": (messages.LeaseRequest, messages.LeaseReply),
    "/v1/leases/return": (messages.ReturnLeases, messages.HeartbeatReply),
    "/v1/leases/progress": (messages.LeaseProgress, messages.LeaseProgressReply),
    "/v1/rollouts": (messages.Submission, messages.SubmissionReply),
    "/v1/plan": (messages.PlanRequest, messages.FetchPlan),
    "/v1/fetched": (messages.Fetched, messages.HeartbeatReply),
    "/v1/verdicts": (auditing.Why, auditing.Explanations),
    "/v1/earnings": (owner.EarningsRequest, owner.Earnings),
    "/v1/payouts": (payout_proof.PayoutRequest, payout_proof.PayoutReply),
    "/v1/probe/dial": (messages.Dial, messages.Dialled),
}
"""Signed messages of nodes, and the replies to them, by path."""

SAID: dict[str, tuple[Kind | None, Kind | None]] = {
    "/v1/learner/state": (None, learning.LearnerState),
    "/v1/learner/evaluations/{number}/samples": (None, learning.EvaluationSamples),
    "/v1/learner/uploads/{version}": (None, learning.KnownUploads),
    "/v1/learner/versions": (learning.Publication, None),
    "/v1/learner/versions/{version}": (None, learning.Publication),
    "/v1/learner/batches/{number}": (None, learning.TrainingBatch),
    "/v1/learner/reports": (learning.UpdateReport, None),
    "/v1/learner/commitments": (learning.UpdateCommitment, None),
    "/v1/learner/progress": (learning.LearnerProgress, None),
    "/v1/learner/offers": (learning.OfferOutcome, learning.OfferedVersion),
    "/v1/auditor/take": (auditing.TakeCases, auditing.Cases),
    "/v1/auditor/hold": (auditing.HoldCases, None),
    "/v1/auditor/verdicts": (auditing.Verdicts, None),
    "/v1/origins": (None, OriginList),
    "/v1/probe/upload": (None, messages.Uploaded),
    "/v1/appeals": (None, appeal.AppealReply),
    "/v1/training/batches/{number}": (None, learning.KeptBatch),
    "/v1/receipts": (proof.ReceiptsRequest, proof.LedgerReceipts),
    "/v1/ledger/cosigned": (None, witness.Cosigned),
    "/v1/ledger/cosignatures": (None, witness.CosignatureReply),
}
"""Unsigned messages and their replies, by path: of the operator's own programs, and public ones."""

PRODUCES: dict[str, str | tuple[str, ...]] = {
    "/": "text/html", "/join": "text/html", "/leaderboard": "text/html", "/entries": "text/html",
    "/favicon.ico": "image/png", "/robots.txt": "text/plain", "/feed.atom": "application/atom+xml",
    "/training": "text/html", "/nodes/{node}": "text/html", "/entries/{index}": "text/html",
    "/verify.html": "text/html", "/usage": "text/html",
    "/metrics": "text/plain", "/healthz": "text/plain", "/v1/ledger/checkpoint": "text/plain",
    "/v1/events": "text/event-stream", "/install.sh": "text/x-shellscript",
    "/v1/owners/{owner}/rates": JSON,
    "/v1/training/kept": JSON, "/v1/training/settings/{digest}": JSON,
    "/v1/listing": JSON, "/v1/leaderboard": JSON, "/v1/status": JSON, "/v1/broadcast": JSON, "/v1/measured": JSON,
    "/v1/evaluations": JSON, "/v1/evaluations/samples": JSON, "/openapi.json": JSON,
    "/v1/operator/status": JSON, "/v1/operator/nodes": JSON, "/v1/operator/nodes/{node}": JSON,
    "/v1/operator/keys": JSON, "/v1/usage": JSON,
    "/v1/operator/bans/{node}": JSON, "/v1/operator/audits": JSON, "/v1/operator/audits/{claim}": JSON,
    "/v1/operator/orders": JSON, "/v1/operator/hold": JSON, "/v1/operator/finish": JSON, "/v1/operator/rulings": JSON,
    "/v1/operator/appeals": JSON, "/v1/operator/appeals/{number}": JSON,
    "/stats/{file}": ("text/csv", JSON, "application/xml", "application/gzip"),
    "/static/{name}": ("text/css", "text/javascript", "image/svg+xml", "image/png"),
    "/v1/models": JSON, "/v1/models/{model}": JSON, "/v1/completions": (JSON, "text/event-stream"),
    "/v1/chat/completions": (JSON, "text/event-stream"),
    "/v1/key": JSON, "/v1/trainer/versions": JSON, "/v1/trainer/files": JSON,
}  # fmt: skip
"""Content types of replies that are not messages; all others are bytes."""

OPERATORS = ("/v1/learner/", "/v1/auditor/", "/v1/operator/", "/v1/measured")
"""Prefixes of the paths that require the operator's token."""

TEMPERATURE = {
    "type": ["number", "null"],
    "minimum": 0,
    "maximum": limits.TEMPERATURE_MAX,
    "description": "0: the likeliest tokens. Without it: the round's `sampling.temperature`.",
}
"""The schema of the only field that changes the distribution of an answer."""

TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

SHARED_FIELDS = {
    "model": {"type": "string", "description": "`swarm`, or `swarm@N` for version N."},
    "n": {"type": "integer", "minimum": 1, "maximum": limits.SAMPLES_MAX},
    "max_tokens": {"type": "integer", "minimum": 1, "description": "At most the round's sampling.max_new_tokens."},
    "temperature": TEMPERATURE,
    "seed": {"type": "integer"},
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}]},
    "stream": {"type": "boolean"},
    "return_token_ids": {"type": "boolean"},
    "priority": {"type": "integer", "minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX, "default": 0},
    "max_price_micros_per_mtok": {
        "type": "integer",
        "minimum": 0,
        "maximum": limits.PRICE_MAX_MICROS_PER_MTOK,
        "description": "Of a node that may answer.",
    },
    "prompt_token_ids": TOKEN_IDS,
}

ASKED = {
    "/v1/completions": {
        "prompt": {"anyOf": [{"type": "string", "minLength": 1}, TOKEN_IDS, {"type": "array", "items": TOKEN_IDS}]},
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 1},
    },
    "/v1/chat/completions": {
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
            },
        },
        "logprobs": {"type": "boolean"},
    },
}
"""The fields of the endpoint's requests that this document describes; docs/endpoint.md has all of them."""

KEYED = ("/v1/models", "/v1/models/{model}", "/v1/usage", "/v1/completions", "/v1/chat/completions")
"""The endpoint's paths: they require an API key, and their bodies and errors have OpenAI's forms (docs/endpoint.md)."""

DAYS = {
    "name": "days",
    "in": "query",
    "description": "The days whose usage is listed; the last one is today.",
    "schema": {"type": "integer", "minimum": 1, "maximum": limits.USAGE_DAYS_MAX, "default": limits.USAGE_DAYS},
}
COUNT = {
    "name": "count",
    "in": "query",
    "description": "The most samples in the answer.",
    "schema": {
        "type": "integer",
        "minimum": 1,
        "maximum": limits.EVALUATION_SAMPLES_MAX,
        "default": limits.EVALUATION_SAMPLES_MAX,
    },
}
QUERIED = {
    "/v1/usage": (DAYS,),
    "/v1/operator/keys": (DAYS,),
    "/v1/learner/evaluations/{number}/samples": (COUNT,),
}
"""The parameters after the question mark that this document describes, by path."""

TRAINERS = ("/v1/key", "/v1/trainer/")
"""Prefixes of the paths that require an API key, and have our form of errors (docs/trainers.md)."""

ERROR = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string", "enum": sorted(ERRORS)},
        "message": {"type": "string"},
        "hint": {"type": "string"},
    },
}


def describe(tables: Sequence[Routes]) -> dict[str, Any]:
    """Build the document for the routes in `tables`."""
    kinds = {kind for pair in [*SIGNED.values(), *SAID.values()] for kind in pair if kind is not None}
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for route in (route for table in tables for route in table):
        if isinstance(route, web.RouteDef):
            path, parameters = _path(route.path)
            paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, parameters)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Echo Swarm coordinator",
            "version": metadata.version("echo-swarm"),
            "description": "docs/protocol.md is the specification; this document is an overview of it.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {
                "operator": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(route: web.RouteDef, path: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    asked, answered = SIGNED.get(path) or SAID.get(path) or (None, None)
    said = (inspect.getdoc(route.handler) or "").strip()
    produced = PRODUCES.get(path, BYTES)
    kinds = (MSGPACK,) if answered else (produced,) if isinstance(produced, str) else produced
    content = {kind: {"schema": _ref(answered)} if answered else {} for kind in kinds}
    operation: dict[str, Any] = {
        "operationId": f"{route.handler.__module__.rpartition('.')[2]}_{route.handler.__name__}",
        "summary": said.partition("\n")[0],
        "parameters": [*parameters, *QUERIED.get(path, ())],
        "responses": {"200": {"description": "The request succeeded.", "content": content}, "default": _failure()},
    }
    if path.startswith(OPERATORS):
        operation["security"] = [{"operator": []}]
    if path in KEYED or path.startswith(TRAINERS):
        operation["security"] = [{"api_key": []}]
    if path in KEYED:
        operation["responses"]["default"] = {"description": "An error in OpenAI's form.", "content": {JSON: {}}}
    if route.method in ("POST", "PUT"):
        operation["requestBody"] = _body(path, asked)
    return operation


def _body(path: str, asked: Kind | None) -> dict[str, Any]:
    if path in SIGNED and asked is not None:
        said = f"A signed request around the message {asked.__name__}."
        return {"description": said, "required": True, "content": {MSGPACK: {"x-message": _ref(asked)}}}
    if path in KEYED:
        schema = {"type": "object", "required": ["model"], "properties": {**SHARED_FIELDS, **ASKED[path]}}
        return {"description": "docs/endpoint.md", "required": True, "content": {JSON: {"schema": schema}}}
    kind, schema = (MSGPACK, {"schema": _ref(asked)}) if asked is not None else (BYTES, {})
    return {"required": True, "content": {kind: schema}}


def _ref(kind: Kind) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _failure() -> dict[str, Any]:
    schema = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {"description": "A named error.", "content": {MSGPACK: schema, JSON: schema}}


def _path(pattern: str) -> tuple[str, list[dict[str, Any]]]:
    """Return a route's path without patterns, and its parameters with their patterns."""
    plain, parameters = "", []
    for literal, name, rule in _pieces(pattern):
        plain += literal
        if name:
            plain += f"{{{name}}}"
            schema = {"type": "string", "pattern": f"^(?:{rule})$"} if rule else {"type": "string", "minLength": 1}
            parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    return plain, parameters


def _pieces(pattern: str) -> Iterator[tuple[str, str, str]]:
    """Yield literal text with the name and pattern of the parameter after it; patterns may contain braces."""
    while "{" in pattern:
        literal, _, rest = pattern.partition("{")
        depth = 1
        for end, letter in enumerate(rest):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if not depth:
                name, _, rule = rest[:end].partition(":")
                yield literal, name, rule
                pattern = rest[end + 1 :]
                break
    yield pattern, "", ""


def serve(app: web.Application, tables: Sequence[Routes]) -> None:
    """Serve `/openapi.json`, which describes the routes in `tables` and itself.

    It is built for the first request: that takes as long as a fifth of all else at a start.
    """

    async def openapi(_request: web.Request) -> web.Response:
        """Return this description of the API."""
        return web.Response(body=text(), content_type=JSON)

    own = web.get("/openapi.json", openapi)

    @cache
    def text() -> bytes:
        return json.dumps(describe([*tables, [own]]), indent=1).encode()

    app.add_routes([own])
