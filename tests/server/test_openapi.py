"""The OpenAPI schema is complete, and schemathesis finds no undocumented responses."""

import json

import pytest
from server_load import malformed

from llmc.server.protocol import ChatRequest


def test_the_openapi_schema_has_all_paths_and_fields(server):
    told = json.loads(server.get("/openapi.json"))
    assert {*told["paths"]} >= {"/v1/chat/completions", "/v1/completions", "/v1/responses",
                                "/v1/models", "/tokenize", "/detokenize", "/health", "/metrics"}
    chat = told["paths"]["/v1/chat/completions"]["post"]
    assert {*chat["responses"]} == {"200", "400", "401", "403", "404", "408", "413", "415", "429",
                                    "503"}
    listed = told["paths"]["/v1/responses/{name}/input_items"]["get"]["parameters"]
    assert [own["name"] for own in listed] == ["limit", "order", "after", "name"]
    schemas = told["components"]["schemas"]
    assert {*schemas["ChatRequest"]["properties"]} == {*ChatRequest.model_fields}
    found = json.dumps(told).split('"$ref": "#/components/schemas/')[1:]
    assert {own.split('"')[0] for own in found} <= {*schemas}


def test_the_openapi_schema_has_both_key_headers(server):
    told = json.loads(server.get("/openapi.json"))
    assert told["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    assert told["paths"]["/v1/messages"]["post"]["security"] == [{}, {"key": []}, {"x_api_key": []}]
    assert "security" not in told["paths"]["/health"]["get"]


def test_schemathesis_requests_get_described_responses(server):
    pytest.importorskip("schemathesis", reason="needs the extra test-serve")
    found = malformed(server.url, seed=1, examples=8)
    assert found[200] >= 20 and found[400] >= 20, found
    assert {*found} <= {200, 400, 404, 415}, found
